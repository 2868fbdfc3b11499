"""Judging the evidence: attacks, statistics, BatchNorm analysis, audits and reports."""
