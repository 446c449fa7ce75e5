"""Stores: files of training runs and evaluations, on this machine or in cloud storage."""
