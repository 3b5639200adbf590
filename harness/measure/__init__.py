"""What is read off a trial: clocks, memory, processors, errors of quantisation, the machine."""
