"""Audits: a checkpoint judged by a pool, or a pool judged by itself -> AuditResult."""

from mia_audit.audit.of_pool import audit_pool
from mia_audit.audit.of_target import audit_target

__all__ = ["audit_pool", "audit_target"]
