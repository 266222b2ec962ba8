//! A virtqueue whose driver changes it while it is served.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vhost::any_ring(bytes));
