//! Exchanges that generate a key of TLS.

use wire_nvme::auth::{AuthBody, AuthMessage};

use super::golden::Counted;
use super::*;

/// Of `golden.py`: the hash function, the group, what the host asks for, whether the controller proves its
/// key, and SHA-256 of the responses, the identity and the key.
const TABLE: &[(AuthHash, DhGroup, u8, bool, &str)] = &[
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe2048,
        2,
        false,
        "dc1b2c40ca7c1d9c123d10c9a95f6a3f303b90f5d3b1fdfa4340fccecc57d5cb",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe2048,
        2,
        true,
        "845d8c10c8fcef677157c20e5f9892b301a668985f24e2af1d248b450281423d",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe2048,
        3,
        false,
        "a97b10e4ca73199c8e2d76015ef0c224f07fbcdfd80d9a9f7094009a8ef94f1d",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe2048,
        3,
        true,
        "f40fa12e53e198b80a9018d890eb6103ec5d9eea4c040401c8bc7b00c32253d1",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe3072,
        2,
        false,
        "786f13882c9b251e6493bacfd42a509fcb6fff4f5f68ef0ce7a7ad50bff632e0",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe3072,
        2,
        true,
        "b8053fa7d12589686e5a24ed4c0b91d829889b22b8b4a7a0f7098985d1ee81da",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe3072,
        3,
        false,
        "56b9845d0a59ee5d7aa13f8e9677c904cdbe5fe65f83772e07799bc3f5a8a85b",
    ),
    (
        AuthHash::Sha256,
        DhGroup::Ffdhe3072,
        3,
        true,
        "90a82e3b0a22d8e212aaffe42e6bac1120e239e5dcb6d3855b42e9f0066aeb28",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe2048,
        2,
        false,
        "4517076f22bcf41f4f07f68db95d815b367089520bda35759f29d255c28dd45d",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe2048,
        2,
        true,
        "38af42f7387b384565e6cef757e2e6ba2f7a93ab5fff515b1420908e2f0e9a16",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe2048,
        3,
        false,
        "9be4edd0171dd3a11baf5143007ab21b5e0b08a6ecb32df1d502440cce3297bb",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe2048,
        3,
        true,
        "e165d92249c2a89a0b00ad97f9834e99a91d328ab2d6ebcffe679e489268f672",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe3072,
        2,
        false,
        "e993960a3fcde434ba38d90d9ce32ccf26d1995d87e0c764544d0a0aeb608224",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe3072,
        2,
        true,
        "88e9a8ed4b5f83491340ea09ac9ef31c729ab7a89ea88992d413d5744c53f9b0",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe3072,
        3,
        false,
        "4c6f11bd8eccb9d908a7a43ec2aa701c12c3ab5653797b5a98d51a009926e9a6",
    ),
    (
        AuthHash::Sha384,
        DhGroup::Ffdhe3072,
        3,
        true,
        "33e0851f06083bc2c10e4b6e039ceb77c7cedf4d3d80609b63057188e25aaf9d",
    ),
];

fn pair(keys: AuthKeys, rule: ConcatenationRule, asked: Concatenation, options: [&AuthOptions; 2]) -> Pair {
    let mut pair = Pair::new([keys.clone(), keys.clone()], options);
    pair.controller = pair.controller.with_concatenation(rule);
    (pair.host, pair.negotiate) = HostAuth::concatenating(keys, parties(), options[1], 7, asked);
    pair
}

fn quick() -> AuthOptions {
    AuthOptions { hashes: AuthHash::ALL.to_vec(), groups: vec![DhGroup::Null, DhGroup::Ffdhe2048] }
}

/// Runs the exchange; returns the key of each end.
fn run(pair: &mut Pair) -> [Option<TlsPsk>; 2] {
    let mut message = std::mem::take(&mut pair.negotiate);
    loop {
        assert_eq!((pair.controller.take_generated(), pair.controller.status()), (None, AuthStatus::Pending));
        pair.controller.sent(&message, &mut SystemNonces);
        match pair.host.receive(&received(&mut pair.controller), &mut SystemNonces) {
            HostAction::Send(next) => message = next,
            HostAction::SendLast(last) => {
                assert_eq!(
                    pair.controller.take_generated(),
                    None,
                    "the host has not verified the controller"
                );
                pair.controller.sent(&last, &mut SystemNonces);
                break;
            }
            HostAction::Authenticated => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(pair.controller.status(), AuthStatus::Authenticated);
    [pair.controller.take_generated(), pair.host.take_generated()]
}

#[test]
fn generated_keys_are_those_of_another_implementation() {
    let ascending = |first: u8, count: usize| -> Vec<u8> { (0..count).map(|at| first + at as u8).collect() };
    let key = |first| AuthKey::new(Some(AuthHash::Sha256), &ascending(first, 32)).unwrap();
    for (hash, group, sc_c, mutual, expected) in TABLE {
        let keys = AuthKeys { host: key(7), controller: mutual.then(|| key(99)) };
        let options = AuthOptions { hashes: vec![*hash], groups: vec![*group] };
        let asked = Concatenation::from_wire(*sc_c).unwrap();
        let rule = match asked {
            Concatenation::NewTlsPsk => ConcatenationRule::Required,
            _ => ConcatenationRule::Replaces,
        };
        let mut nonces = Counted::default();
        let mut controller =
            ControllerAuth::new(keys.clone(), parties(), options.clone()).with_concatenation(rule);
        let (mut host, negotiate) = HostAuth::concatenating(keys, parties(), &options, 0x1234, asked);
        controller.sent(&negotiate, &mut nonces);
        let HostAction::Send(reply) = host.receive(&received(&mut controller), &mut nonces) else { panic!() };
        controller.sent(&reply, &mut nonces);
        let success = received(&mut controller);
        match host.receive(&success, &mut nonces) {
            HostAction::SendLast(last) if *mutual => controller.sent(&last, &mut nonces),
            HostAction::Authenticated if !mutual => {}
            other => panic!("{other:?}"),
        }
        let AuthBody::Reply(one) = AuthMessage::decode(&reply).unwrap().body else { panic!() };
        let AuthBody::Success1(_, two) = AuthMessage::decode(&success).unwrap().body else { panic!() };
        assert_eq!((one.sequence != 0, one.challenge.is_some(), two.is_some()), (*mutual, true, *mutual));
        let psk = controller.take_generated().unwrap();
        assert_eq!(host.take_generated().as_ref(), Some(&psk));
        let two = two.unwrap_or_default();
        let all = [one.response, two, psk.identity.as_bytes(), psk.key.reveal()].concat();
        let all: String =
            crate::hash::digest(AuthHash::Sha256, &all).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(all, *expected, "{hash:?}, {group:?}, {asked:?}, mutual: {mutual}");
    }
}

#[test]
fn both_ends_generate_the_same_key_and_another_each_time() {
    let mut keys: Vec<TlsPsk> = Vec::new();
    for (rule, asked) in [
        (ConcatenationRule::Required, Concatenation::NewTlsPsk),
        (ConcatenationRule::Replaces, Concatenation::ReplaceTlsPsk),
    ] {
        for auth_keys in [one_key(), both_keys()] {
            let [at_controller, at_host] = run(&mut pair(auth_keys, rule, asked, [&quick(); 2]));
            assert_eq!(at_controller, at_host);
            let psk = at_host.unwrap();
            // Of SHA-256 though both accept others.
            assert!(
                psk.identity.starts_with(&format!("NVMe1G01 {HOST} nqn.2026-11.io.ringbolt:a ")),
                "{psk:?}"
            );
            assert!(keys.iter().all(|other| other.identity != psk.identity && other.key != psk.key));
            keys.push(psk);
        }
    }
    let none = Concatenation::None;
    assert_eq!(run(&mut pair(one_key(), ConcatenationRule::Replaces, none, [&quick(); 2])), [None, None]);
}

#[test]
fn what_a_connection_does_not_accept_fails_the_negotiation() {
    let mismatch = AuthFailure::ConcatenationMismatch;
    for (rule, asked) in [
        (ConcatenationRule::Refused, Concatenation::NewTlsPsk),
        (ConcatenationRule::Refused, Concatenation::ReplaceTlsPsk),
        (ConcatenationRule::Required, Concatenation::None),
        (ConcatenationRule::Required, Concatenation::ReplaceTlsPsk),
        (ConcatenationRule::Replaces, Concatenation::NewTlsPsk),
    ] {
        let pair = pair(one_key(), rule, asked, [&quick(); 2]);
        assert!(!pair.controller.computes(&pair.negotiate), "{rule:?}, {asked:?}");
        let failed = AuthStatus::Failed(AuthMessageKind::Negotiate, mismatch);
        assert_eq!(pair.run(), (failed, Err(HostAuthError::Rejected(mismatch))), "{rule:?}, {asked:?}");
    }
    for sc_c in [1, 4, 255] {
        for rule in [ConcatenationRule::Refused, ConcatenationRule::Required, ConcatenationRule::Replaces] {
            let mut pair = pair(one_key(), rule, Concatenation::NewTlsPsk, [&quick(); 2]);
            pair.negotiate[6] = sc_c;
            pair.controller.sent(&pair.negotiate, &mut SystemNonces);
            assert_eq!(failure_of(&mut pair.controller), mismatch);
        }
    }
}

#[test]
fn without_a_group_or_a_hash_function_of_tls_there_is_no_key() {
    let (rule, asked) = (ConcatenationRule::Required, Concatenation::NewTlsPsk);
    let sha512 = AuthOptions { hashes: vec![AuthHash::Sha512], ..quick() };
    for (options, reason) in
        [(null_group(), AuthFailure::GroupNotUsable), (sha512, AuthFailure::HashNotUsable)]
    {
        // The host does not offer them, and the controller does not select them.
        for both in [[&options, &quick()], [&quick(), &options]] {
            let result = pair(one_key(), rule, asked, both).run();
            assert_eq!(result.1, Err(HostAuthError::Rejected(reason)), "{options:?}");
        }
    }
}

/// A peer in between cannot have both ends believe that the other wants something else.
#[test]
fn a_changed_request_is_noticed() {
    let mut pair = pair(one_key(), ConcatenationRule::Replaces, Concatenation::ReplaceTlsPsk, [&quick(); 2]);
    pair.negotiate[6] = Concatenation::None.to_wire();
    let reply = pair.until_reply();
    pair.controller.sent(&reply, &mut SystemNonces);
    assert_eq!(failure_of(&mut pair.controller), AuthFailure::Failed);
    assert_eq!(pair.controller.take_generated(), None);
}

#[test]
fn a_host_without_a_challenge_or_with_the_controllers_own_gets_no_key() {
    for (is_reflected, reason) in [(false, AuthFailure::IncorrectPayload), (true, AuthFailure::Failed)] {
        let (rule, asked) = (ConcatenationRule::Required, Concatenation::NewTlsPsk);
        let mut pair = pair(one_key(), rule, asked, [&quick(); 2]);
        pair.controller.sent(&pair.negotiate, &mut SystemNonces);
        let challenge = received(&mut pair.controller);
        let HostAction::Send(reply) = pair.host.receive(&challenge, &mut SystemNonces) else { panic!() };
        let mut reply = AuthMessage::decode(&reply).unwrap();
        let AuthBody::Reply(body) = &mut reply.body else { panic!() };
        let AuthBody::Challenge(of_controller) = AuthMessage::decode(&challenge).unwrap().body else {
            panic!()
        };
        body.challenge = is_reflected.then_some(of_controller.challenge);
        pair.controller.sent(&reply.encode(), &mut SystemNonces);
        assert_eq!(failure_of(&mut pair.controller), reason);
        assert_eq!(pair.controller.take_generated(), None);
    }
}

#[test]
fn a_controller_that_does_not_prove_its_key_leaves_the_host_without_one() {
    let (rule, asked) = (ConcatenationRule::Required, Concatenation::NewTlsPsk);
    let mut pair = pair(both_keys(), rule, asked, [&quick(); 2]);
    pair.controller.set_keys(AuthKeys { host: key(1), controller: Some(key(3)) }, quick());
    let reply = pair.until_reply();
    pair.controller.sent(&reply, &mut SystemNonces);
    let HostAction::Failed(HostAuthError::ControllerNotProven, Some(last)) =
        pair.host.receive(&received(&mut pair.controller), &mut SystemNonces)
    else {
        panic!()
    };
    assert_eq!(pair.host.take_generated(), None);
    pair.controller.sent(&last, &mut SystemNonces);
    assert!(matches!(pair.controller.status(), AuthStatus::Failed(AuthMessageKind::Failure2, _)));
    assert_eq!(pair.controller.take_generated(), None);
}
