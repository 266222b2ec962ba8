//! Every decoder of iSCSI with arbitrary bytes. Decoded values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_iscsi::*;

macro_rules! round_trip {
    ($bytes:expr, $($pdu:ident),*) => {$(
        if let Ok(decoded) = $pdu::decode($bytes) {
            assert_eq!($pdu::decode(&decoded.to_bytes()), Ok(decoded));
        }
    )*};
}

fuzz_target!(|bytes: &[u8]| {
    round_trip!(
        bytes, NopOut, ScsiCommand, TaskManagementRequest, LoginRequest, TextRequest, DataOut, LogoutRequest,
        SnackRequest, NopIn, ScsiResponse, TaskManagementResponse, LoginResponse, TextResponse, DataIn, LogoutReply,
        R2t, AsyncMessage, Reject
    );
    let mut written = TextWriter::default();
    let pairs: Vec<_> = TextKeys::new(bytes).filter_map(Result::ok).collect();
    for (key, value) in &pairs {
        written.push(key, value);
        _ = (text::number(value), text::range(value), text::boolean(value));
        if let Ok(binary) = text::binary(value, 1024) {
            assert_eq!(text::binary(&text::to_hex(&binary), 1024), Ok(binary));
        }
    }
    let again: Vec<_> = TextKeys::new(written.bytes()).map(Result::unwrap).collect();
    assert_eq!(again, pairs);
});
