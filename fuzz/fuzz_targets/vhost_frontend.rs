//! Arbitrary bytes as a vhost-user front-end and its driver: messages, virtqueues, requests and SCSI commands.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| vhost::any_frontend(bytes));
