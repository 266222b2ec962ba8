//! Arbitrary bytes as the commands of several nexuses of a SCSI logical unit.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| scsi::any_bytes(bytes));
