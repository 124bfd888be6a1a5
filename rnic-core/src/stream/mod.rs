//! The sans-IO iWARP stream: start-up machines and receive validation.
