//! Arbitrary bytes as the traffic of a host, from ICReq to I/O queues.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| nvmf::testing::any_bytes(bytes));
