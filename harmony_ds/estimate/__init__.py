"""Predictions without a device, or without training: sizes, times, plans and ways out of too little memory."""
