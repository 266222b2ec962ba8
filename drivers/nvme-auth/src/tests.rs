mod concatenation;
mod golden;

use proptest::prelude::*;
use wire_nvme::auth::{AuthBody, AuthMessage, AuthMessageKind, AuthReply};

use super::*;

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555";

fn parties() -> AuthParties {
    AuthParties::new(HOST, "nqn.2026-11.io.ringbolt:a")
}

fn key(byte: u8) -> AuthKey {
    AuthKey::new(Some(AuthHash::Sha256), &[byte; 32]).unwrap()
}

fn null_group() -> AuthOptions {
    AuthOptions { groups: vec![DhGroup::Null], ..AuthOptions::default() }
}

fn received(controller: &mut ControllerAuth) -> Vec<u8> {
    let Received::Message(message) = controller.receive(4096) else { panic!("no message is due") };
    message
}

/// A controller and a host with these keys: of the host at the controller and at the host, and of the
/// controller.
struct Pair {
    controller: ControllerAuth,
    host: HostAuth,
    negotiate: Vec<u8>,
}

impl Pair {
    fn new(keys: [AuthKeys; 2], options: [&AuthOptions; 2]) -> Pair {
        let [at_controller, at_host] = keys;
        let controller = ControllerAuth::new(at_controller, parties(), options[0].clone());
        let (host, negotiate) = HostAuth::new(at_host, parties(), options[1], 7);
        Pair { controller, host, negotiate }
    }

    /// Runs the exchange to its end. Returns what each end makes of it.
    fn run(mut self) -> (AuthStatus, Result<(), HostAuthError>) {
        let mut message = std::mem::take(&mut self.negotiate);
        loop {
            self.controller.sent(&message, &mut SystemNonces);
            let answer = received(&mut self.controller);
            match self.host.receive(&answer, &mut SystemNonces) {
                HostAction::Send(next) => message = next,
                HostAction::SendLast(last) => {
                    self.controller.sent(&last, &mut SystemNonces);
                    return (self.controller.status(), Ok(()));
                }
                HostAction::Authenticated => return (self.controller.status(), Ok(())),
                HostAction::Failed(error, last) => {
                    last.iter().for_each(|last| self.controller.sent(last, &mut SystemNonces));
                    return (self.controller.status(), Err(error));
                }
            }
        }
    }

    /// Up to the host's reply, which the controller has not received.
    fn until_reply(&mut self) -> Vec<u8> {
        self.controller.sent(&self.negotiate, &mut SystemNonces);
        let challenge = received(&mut self.controller);
        match self.host.receive(&challenge, &mut SystemNonces) {
            HostAction::Send(reply) => reply,
            other => panic!("{other:?}"),
        }
    }
}

/// What Failure1 says next, and that the exchange has ended with it.
fn failure_of(controller: &mut ControllerAuth) -> AuthFailure {
    let message = received(controller);
    let AuthBody::Failure1(reason) = AuthMessage::decode(&message).unwrap().body else {
        panic!("{message:?}")
    };
    assert!(matches!(controller.status(), AuthStatus::Failed(_, same) if same == reason));
    assert_eq!(controller.receive(4096), Received::NotExpected);
    reason
}

fn both_keys() -> AuthKeys {
    AuthKeys { host: key(1), controller: Some(key(2)) }
}

fn one_key() -> AuthKeys {
    AuthKeys { host: key(1), controller: None }
}

#[test]
fn both_ends_agree_with_every_hash_and_group() {
    for hash in AuthHash::ALL {
        for group in DhGroup::ALL {
            let options = AuthOptions { hashes: vec![*hash], groups: vec![*group] };
            for keys in [one_key(), both_keys()] {
                let pair = Pair::new([keys.clone(), keys], [&options, &options]);
                assert_eq!(pair.run(), (AuthStatus::Authenticated, Ok(())), "{options:?}");
            }
        }
    }
}

#[test]
fn a_host_need_not_challenge_a_controller_that_has_a_key() {
    let pair = Pair::new([both_keys(), one_key()], [&null_group(); 2]);
    assert_eq!(pair.run(), (AuthStatus::Authenticated, Ok(())));
}

#[test]
fn a_host_that_confirms_what_it_did_not_challenge_stays_authenticated() {
    let mut pair = Pair::new([one_key(), one_key()], [&null_group(); 2]);
    let reply = pair.until_reply();
    pair.controller.sent(&reply, &mut SystemNonces);
    assert!(pair.controller.is_in_progress());
    received(&mut pair.controller);
    let success = AuthMessage { transaction: 7, body: AuthBody::Success2 }.encode();
    pair.controller.sent(&success, &mut SystemNonces);
    assert_eq!(pair.controller.status(), AuthStatus::Authenticated);
    assert!(!pair.controller.is_in_progress() && pair.controller.failure().is_none());
}

#[test]
fn a_failure_is_known_before_the_host_fetches_it() {
    let mut pair = Pair::new([one_key(), one_key()], [&null_group(); 2]);
    let mut reply = pair.until_reply();
    reply[20] ^= 1;
    pair.controller.sent(&reply, &mut SystemNonces);
    assert!(pair.controller.failure().is_some() && pair.controller.is_in_progress());
}

#[test]
fn messages_with_exponentiations_are_known() {
    let large = AuthOptions { groups: vec![DhGroup::Ffdhe2048], ..AuthOptions::default() };
    for (options, computes) in [(null_group(), false), (large, true)] {
        let mut pair = Pair::new([one_key(), one_key()], [&options; 2]);
        assert_eq!(pair.controller.computes(&pair.negotiate), computes);
        let reply = pair.until_reply();
        assert_eq!(pair.controller.computes(&reply), computes);
        // It is not due any more.
        assert!(!pair.controller.computes(&pair.negotiate) && !pair.controller.computes(&[]));
    }
}

#[test]
fn wrong_keys_fail_at_the_end_that_verifies_them() {
    let (failed, reject) = (AuthFailure::Failed, HostAuthError::Rejected(AuthFailure::Failed));
    let by_reply = AuthStatus::Failed(AuthMessageKind::Reply, failed);
    let by_host = AuthStatus::Failed(AuthMessageKind::Failure2, failed);
    let other_host = AuthKeys { host: key(3), controller: None };
    let other_controller = AuthKeys { host: key(1), controller: Some(key(3)) };
    for (at_controller, at_host, expected) in [
        (one_key(), other_host, (by_reply, Err(reject))),
        (both_keys(), other_controller, (by_host, Err(HostAuthError::ControllerNotProven))),
        // The host asks for a proof that the controller has no key for.
        (one_key(), both_keys(), (by_reply, Err(reject))),
    ] {
        let pair = Pair::new([at_controller, at_host], [&null_group(); 2]);
        assert_eq!(pair.run(), expected);
    }
}

#[test]
fn a_key_of_another_name_or_hash_does_not_match() {
    let mut pair = Pair::new([one_key(), one_key()], [&null_group(); 2]);
    pair.controller = ControllerAuth::new(
        one_key(),
        AuthParties { hostnqn: "nqn.2026-11.io:b".into(), ..parties() },
        null_group(),
    );
    assert_eq!(pair.run().0, AuthStatus::Failed(AuthMessageKind::Reply, AuthFailure::Failed));
    let plain = AuthKeys { host: AuthKey::new(None, &[1; 32]).unwrap(), controller: None };
    let pair = Pair::new([one_key(), plain], [&null_group(); 2]);
    assert_eq!(pair.run().0, AuthStatus::Failed(AuthMessageKind::Reply, AuthFailure::Failed));
}

#[test]
fn options_without_a_common_element_fail_with_the_reason() {
    let options = |hash, group| AuthOptions { hashes: vec![hash], groups: vec![group] };
    let own = options(AuthHash::Sha256, DhGroup::Null);
    for (of_host, reason) in [
        (options(AuthHash::Sha512, DhGroup::Null), AuthFailure::HashNotUsable),
        (options(AuthHash::Sha256, DhGroup::Ffdhe2048), AuthFailure::GroupNotUsable),
    ] {
        let (status, result) = Pair::new([one_key(), one_key()], [&own, &of_host]).run();
        assert_eq!(result, Err(HostAuthError::Rejected(reason)));
        assert_eq!(status, AuthStatus::Failed(AuthMessageKind::Negotiate, reason));
    }
}

#[test]
fn the_strongest_common_options_are_selected() {
    let mut pair = Pair::new([one_key(), one_key()], [&AuthOptions::default(); 2]);
    pair.controller.set_keys(
        one_key(),
        AuthOptions { hashes: AuthHash::ALL.to_vec(), groups: vec![DhGroup::Null, DhGroup::Ffdhe2048] },
    );
    pair.controller.sent(&pair.negotiate, &mut SystemNonces);
    let challenge = received(&mut pair.controller);
    let AuthBody::Challenge(challenge) = AuthMessage::decode(&challenge).unwrap().body else { panic!() };
    assert_eq!((challenge.hash, challenge.group), (AuthHash::Sha512, DhGroup::Ffdhe2048));
}

#[test]
fn a_host_refuses_what_it_has_not_offered() {
    let mut controller = ControllerAuth::new(one_key(), parties(), AuthOptions::default());
    let own = AuthOptions { hashes: vec![AuthHash::Sha512], groups: vec![DhGroup::Null] };
    let offered = AuthOptions { hashes: vec![AuthHash::Sha256], groups: vec![DhGroup::Null] };
    let (_, negotiate) = HostAuth::new(one_key(), parties(), &offered, 7);
    let (mut host, _) = HostAuth::new(one_key(), parties(), &own, 7);
    controller.sent(&negotiate, &mut SystemNonces);
    let action = host.receive(&received(&mut controller), &mut SystemNonces);
    let error = HostAuthError::Refused(AuthMessageKind::Challenge, AuthFailure::HashNotUsable);
    assert!(matches!(action, HostAction::Failed(same, Some(_)) if same == error));
}

#[test]
fn a_reply_of_another_exchange_fails() {
    let new = || Pair::new([one_key(), one_key()], [&null_group(); 2]);
    let (mut first, mut second) = (new(), new());
    let replayed = first.until_reply();
    second.until_reply();
    second.controller.sent(&replayed, &mut SystemNonces);
    assert_eq!(failure_of(&mut second.controller), AuthFailure::Failed);
    // And the same reply twice.
    first.controller.sent(&replayed, &mut SystemNonces);
    received(&mut first.controller);
    assert_eq!(first.controller.status(), AuthStatus::Authenticated);
    first.controller.sent(&replayed, &mut SystemNonces);
    assert_eq!(failure_of(&mut first.controller), AuthFailure::IncorrectMessage);
}

/// An attacker without a key sends the controller's challenge back, to have it compute the response.
#[test]
fn a_reflected_challenge_fails() {
    let same = AuthKeys { host: key(1), controller: Some(key(1)) };
    let mut pair = Pair::new([same.clone(), same], [&null_group(); 2]);
    pair.controller.sent(&pair.negotiate, &mut SystemNonces);
    let challenge = received(&mut pair.controller);
    let HostAction::Send(reply) = pair.host.receive(&challenge, &mut SystemNonces) else { panic!() };
    let challenge = AuthMessage::decode(&challenge).unwrap();
    let AuthBody::Challenge(of_controller) = challenge.body else { panic!() };
    let mut reply = AuthMessage::decode(&reply).unwrap();
    let AuthBody::Reply(body) = &mut reply.body else { panic!() };
    body.challenge = Some(of_controller.challenge);
    pair.controller.sent(&reply.encode(), &mut SystemNonces);
    assert_eq!(failure_of(&mut pair.controller), AuthFailure::Failed);

    // A controller without a key that answers with the host's own response is not accepted either.
    let mut pair = Pair::new([both_keys(), both_keys()], [&null_group(); 2]);
    let reply = pair.until_reply();
    let AuthBody::Reply(AuthReply { response, .. }) = AuthMessage::decode(&reply).unwrap().body else {
        panic!()
    };
    let body = AuthBody::Success1(response.len() as u8, Some(response));
    let forged = AuthMessage { transaction: 7, body }.encode();
    let action = pair.host.receive(&forged, &mut SystemNonces);
    assert!(matches!(action, HostAction::Failed(HostAuthError::ControllerNotProven, Some(_))));
}

#[test]
fn a_controller_that_does_not_respond_to_a_challenge_is_not_accepted() {
    let mut pair = Pair::new([both_keys(), both_keys()], [&null_group(); 2]);
    pair.until_reply();
    let silent = AuthMessage { transaction: 7, body: AuthBody::Success1(64, None) }.encode();
    let action = pair.host.receive(&silent, &mut SystemNonces);
    assert!(matches!(action, HostAction::Failed(HostAuthError::ControllerNotProven, Some(_))));
}

#[test]
fn values_that_reveal_the_shared_value_fail() {
    let options = AuthOptions { groups: vec![DhGroup::Ffdhe2048], ..AuthOptions::default() };
    let mut pair = Pair::new([one_key(), one_key()], [&options; 2]);
    let reply = pair.until_reply();
    let (mut one, zero, ones) = (vec![0; 256], vec![0; 256], vec![0xff; 256]);
    one[255] = 1;
    let mut reply = AuthMessage::decode(&reply).unwrap();
    for value in [&one, &zero, &ones, &vec![2; 384], &Vec::new()] {
        let mut pair = Pair::new([one_key(), one_key()], [&options; 2]);
        pair.until_reply();
        let AuthBody::Reply(body) = &mut reply.body else { panic!() };
        body.dh_value = value;
        pair.controller.sent(&reply.encode(), &mut SystemNonces);
        assert_eq!(failure_of(&mut pair.controller), AuthFailure::IncorrectPayload, "{}", value.len());
    }
}

#[test]
fn a_wrong_message_ends_the_exchange_with_its_reason() {
    fn message(transaction: u16, body: AuthBody<'_>) -> Vec<u8> {
        AuthMessage { transaction, body }.encode()
    }
    let new = || Pair::new([one_key(), one_key()], [&null_group(); 2]);
    let negotiate = new().negotiate;
    let concatenation = [&negotiate[..6], &[1], &negotiate[7..]].concat();
    let other_protocol = [&negotiate[..8], &[2], &negotiate[9..]].concat();
    let reply = |length: usize| {
        let response = vec![0; length];
        let body = AuthReply { sequence: 0, response: &response, challenge: None, dh_value: &[] };
        message(7, AuthBody::Reply(body))
    };
    use AuthFailure::*;
    // At the beginning.
    for (bytes, reason) in [
        (message(7, AuthBody::Success2), IncorrectMessage),
        (reply(64), IncorrectMessage),
        (vec![9; 100], IncorrectMessage),
        (Vec::new(), IncorrectMessage),
        (negotiate[..20].to_vec(), IncorrectPayload),
        (negotiate[..7].to_vec(), IncorrectPayload),
        (concatenation, ConcatenationMismatch),
        (other_protocol, ProtocolNotUsable),
    ] {
        let mut pair = new();
        pair.controller.sent(&bytes, &mut SystemNonces);
        assert_eq!(failure_of(&mut pair.controller), reason, "{bytes:?}");
    }
    // After the challenge.
    for (bytes, reason) in [
        (negotiate.clone(), IncorrectMessage),
        (message(7, AuthBody::Success2), IncorrectMessage),
        (reply(64), Failed),
        (reply(32), IncorrectPayload),
        (reply(64)[..30].to_vec(), IncorrectPayload),
        (message(8, AuthBody::Success2), IncorrectMessage),
        ([&reply(64)[..4], &[8], &reply(64)[5..]].concat(), IncorrectPayload),
    ] {
        let mut pair = new();
        pair.until_reply();
        pair.controller.sent(&bytes, &mut SystemNonces);
        assert_eq!(failure_of(&mut pair.controller), reason, "{bytes:?}");
        // Nothing revives it.
        pair.controller.sent(&negotiate, &mut SystemNonces);
        assert_eq!(pair.controller.receive(4096), Received::NotExpected);
    }
}

#[test]
fn a_message_that_does_not_fit_stays_due() {
    let mut pair = Pair::new([one_key(), one_key()], [&null_group(); 2]);
    assert_eq!(pair.controller.receive(4096), Received::NotExpected);
    pair.controller.sent(&pair.negotiate, &mut SystemNonces);
    assert_eq!(pair.controller.receive(79), Received::TooShort);
    assert!(matches!(pair.controller.receive(80), Received::Message(message) if message.len() == 80));
    assert_eq!(pair.controller.receive(4096), Received::NotExpected);
}

#[test]
fn a_host_authenticates_anew_with_new_keys() {
    let mut controller = ControllerAuth::new(one_key(), parties(), null_group());
    for keys in [one_key(), AuthKeys { host: key(5), controller: None }] {
        controller.set_keys(keys.clone(), null_group());
        let (mut host, negotiate) = HostAuth::new(keys, parties(), &null_group(), 9);
        controller.sent(&negotiate, &mut SystemNonces);
        let action = host.receive(&received(&mut controller), &mut SystemNonces);
        let HostAction::Send(reply) = action else { panic!("{action:?}") };
        controller.sent(&reply, &mut SystemNonces);
        let action = host.receive(&received(&mut controller), &mut SystemNonces);
        assert_eq!((action, controller.status()), (HostAction::Authenticated, AuthStatus::Authenticated));
    }
}

#[test]
fn text_that_is_no_key_is_refused_without_its_contents() {
    let good = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
    assert!(AuthKey::parse(good).is_ok());
    for (bad, error) in [
        ("", AuthKeyError::Format),
        ("DHHC-1:00:", AuthKeyError::Format),
        (&good[..good.len() - 1], AuthKeyError::Format),
        (&good.replace("-1:00", "-1:04"), AuthKeyError::Format),
        (&good.replace("-1:00", "-1:0"), AuthKeyError::Format),
        (&good.replace("-1:00", "-1:02"), AuthKeyError::Length(32)),
        (&good.replace("ia6z", "ia6_"), AuthKeyError::Base64),
        (&good.replace("ia6z", "ja6z"), AuthKeyError::Checksum),
        ("DHHC-1:00:AAAA:", AuthKeyError::Length(0)),
        (&"DHHC-1:00:".repeat(100), AuthKeyError::Format),
    ] {
        let found = AuthKey::parse(bad);
        assert_eq!(found, Err(error), "{bad}");
        assert!(!error.to_string().contains("ia6z"));
    }
    assert!(!format!("{:?}", AuthKey::parse(good)).contains("ia6z"));
}

#[test]
fn sequence_numbers_are_not_used_twice() {
    let mut numbers: Vec<u32> = (0..100).map(|_| SystemNonces.sequence().unwrap()).collect();
    assert!(!numbers.contains(&0));
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), 100);
}

#[test]
fn names_of_options_are_spdks() {
    let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
    let all = AuthOptions::default();
    assert_eq!(AuthOptions::parse_hashes(&all.hash_names()), Ok(all.hashes.clone()));
    assert_eq!(AuthOptions::parse_groups(&all.group_names()), Ok(all.groups.clone()));
    assert_eq!(AuthOptions::parse_groups(&names(&["null", "null"])), Ok(vec![DhGroup::Null]));
    assert_eq!(AuthOptions::parse_hashes(&[]), Err(AuthOptionsError::Empty));
    assert_eq!(AuthOptions::parse_hashes(&names(&["md5"])), Err(AuthOptionsError::Hash("md5".into())));
    assert_eq!(AuthOptions::parse_groups(&names(&["sha256"])), Err(AuthOptionsError::Group("sha256".into())));
}

proptest! {
    /// Whatever one byte of one message is changed to, neither end accepts the other wrongly, and none
    /// panics.
    #[test]
    fn a_changed_message_never_authenticates(
        which in 0..4usize, at in 0..1000usize, value in 1..=255u8, mutual in any::<bool>(),
    ) {
        let keys = if mutual { both_keys() } else { one_key() };
        let mut pair = Pair::new([keys.clone(), keys], [&null_group(); 2]);
        let mut count = 0;
        let mut change = |message: &mut Vec<u8>| {
            let (is_this, at) = (count == which, at % message.len());
            count += 1;
            if is_this {
                message[at] ^= value;
            }
            is_this.then_some(at)
        };
        let mut message = std::mem::take(&mut pair.negotiate);
        let mut is_proof_changed = false;
        for _ in 0..3 {
            is_proof_changed |= change(&mut message).is_some_and(|at| message[1] == 2 && at >= 16);
            pair.controller.sent(&message, &mut SystemNonces);
            let Received::Message(mut answer) = pair.controller.receive(4096) else { break };
            change(&mut answer);
            match pair.host.receive(&answer, &mut SystemNonces) {
                HostAction::Send(next) => message = next,
                HostAction::SendLast(last) => {
                    pair.controller.sent(&last, &mut SystemNonces);
                    break;
                }
                HostAction::Authenticated | HostAction::Failed(..) => break,
            }
        }
        // A one-way reply has a field for a challenge that is not used.
        let in_response = which == 2 && (16..16 + 64).contains(&(at % (16 + 128)));
        if in_response && is_proof_changed {
            prop_assert_ne!(pair.controller.status(), AuthStatus::Authenticated);
        }
    }

    #[test]
    fn any_messages_end_without_a_panic(
        messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..6), kinds in any::<u64>(),
    ) {
        let mut controller = ControllerAuth::new(both_keys(), parties(), null_group());
        let (mut host, negotiate) = HostAuth::new(both_keys(), parties(), &null_group(), 7);
        controller.sent(&negotiate, &mut SystemNonces);
        for (index, mut message) in messages.into_iter().enumerate() {
            if message.len() > 1 {
                let kinds = (kinds >> (8 * index)) as u8;
                message[..2].copy_from_slice(&[kinds & 1, kinds >> 4]);
            }
            controller.sent(&message, &mut SystemNonces);
            controller.receive(4096);
            host.receive(&message, &mut SystemNonces);
        }
        prop_assert_ne!(controller.status(), AuthStatus::Authenticated);
    }
}
