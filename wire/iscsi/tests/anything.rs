//! Arbitrary bytes are decoded or rejected, and decoded values round-trip.

use proptest::prelude::*;
use wire_iscsi::*;

macro_rules! round_trip {
    ($bytes:expr, $($pdu:ident),*) => {$(
        if let Ok(decoded) = $pdu::decode($bytes) {
            prop_assert_eq!($pdu::decode(&decoded.to_bytes()), Ok(decoded));
        }
    )*};
}

proptest! {
    #[test]
    fn arbitrary_headers_round_trip(
        mut bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES),
        opcode in 0..Opcode::ALL.len(),
    ) {
        bytes[0] = bytes[0] & 0xc0 | Opcode::ALL[opcode] as u8;
        round_trip!(
            &bytes, NopOut, ScsiCommand, TaskManagementRequest, LoginRequest, TextRequest, DataOut, LogoutRequest,
            SnackRequest, NopIn, ScsiResponse, TaskManagementResponse, LoginResponse, TextResponse, DataIn,
            LogoutReply, R2t, AsyncMessage, Reject
        );
        prop_assert_eq!(BasicHeader::decode(&bytes).map(|header| header.opcode), Ok(Opcode::ALL[opcode]));
    }

    #[test]
    fn arbitrary_text_ends(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let valid = TextKeys::new(&bytes).filter_map(Result::ok).count();
        prop_assert!(TextKeys::new(&bytes).count() <= bytes.len() && valid <= bytes.len());
    }

    #[test]
    fn binary_values_round_trip(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
        prop_assert_eq!(text::binary(&text::to_hex(&bytes), 100), Ok(bytes));
    }
}
