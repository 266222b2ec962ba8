//! Messages of in-band authentication: the decoder, and both ends of an exchange. No message that a peer
//! without the key makes up authenticates it, or generates a key of TLS.
#![no_main]

use std::cell::Cell;

use libfuzzer_sys::fuzz_target;
use nvme_auth::{
    AuthHash, AuthKey, AuthKeys, AuthOptions, AuthParties, AuthStatus, Concatenation, ConcatenationRule,
    ControllerAuth, DhGroup, HostAction, HostAuth, NoRandomness, Nonces, TlsKey,
};
use wire_nvme::auth::AuthMessage;

/// Repeatable numbers, which the input cannot know in advance but by running the exchange.
struct Numbers(Cell<u8>);

impl Nonces for Numbers {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NoRandomness> {
        for byte in bytes {
            self.0.set(self.0.get().wrapping_mul(5).wrapping_add(37));
            *byte = self.0.get();
        }
        Ok(())
    }

    fn sequence(&mut self) -> Result<u32, NoRandomness> {
        Ok(1)
    }
}

fn key(byte: u8) -> AuthKey {
    AuthKey::new(Some(AuthHash::Sha256), &[byte; 32]).expect("32 bytes fit SHA-256")
}

fuzz_target!(|input: &[u8]| {
    let keys = AuthKeys { host: key(1), controller: Some(key(2)) };
    let parties = AuthParties::new("nqn.2026-11.io.ringbolt:host", "nqn.2026-11.io.ringbolt:a");
    // The group of secure channel concatenation takes a millisecond an exponentiation.
    let (rule, asked, group) = match input.first().map(|first| first >> 6) {
        Some(3) => (ConcatenationRule::Required, Concatenation::NewTlsPsk, DhGroup::Ffdhe2048),
        Some(2) => (ConcatenationRule::Replaces, Concatenation::None, DhGroup::Null),
        _ => (ConcatenationRule::Refused, Concatenation::None, DhGroup::Null),
    };
    let options = AuthOptions { groups: vec![group], ..AuthOptions::default() };
    let nonces = &mut Numbers(Cell::new(1));
    let controller = ControllerAuth::new(keys.clone(), parties.clone(), options.clone());
    let mut controller = controller.with_concatenation(rule);
    let (mut host, negotiate) = HostAuth::concatenating(keys, parties, &options, 7, asked);
    let mut rest = input;
    while let Some((&[kind, length], more)) = rest.split_first_chunk::<2>() {
        let length = usize::from(length).min(more.len());
        let (message, after) = more.split_at(length);
        rest = after;
        if let Ok(decoded) = AuthMessage::decode(message) {
            let encoded = decoded.encode();
            assert_eq!(AuthMessage::decode(&encoded), Ok(decoded));
        }
        match kind % 4 {
            0 => controller.sent(message, nonces),
            1 => controller.sent(&negotiate, nonces),
            2 => drop(controller.receive(length)),
            _ => {
                let action = host.receive(message, nonces);
                assert!(!matches!(action, HostAction::Authenticated | HostAction::SendLast(_)));
            }
        }
        assert_ne!(controller.status(), AuthStatus::Authenticated);
        assert_eq!(controller.take_generated(), None);
    }
    let _ = std::str::from_utf8(input).map(AuthKey::parse);
    if let Ok(Ok(key)) = std::str::from_utf8(input).map(TlsKey::parse) {
        assert_eq!(TlsKey::of_secret(&key.to_text()), Ok(key));
    }
});
