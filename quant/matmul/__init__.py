"""matmul"""
