"""Making the evidence: records, membership, shadow models and the pool that stores them.

This package knows nothing of attacks; :mod:`mia_audit` judges what is made here.
"""
