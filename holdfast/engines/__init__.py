"""Engines compute the clients' work of a simulation. Every engine gives the same bits."""
