//! CHAP: an initiator proves that it knows a secret, and the target too if it is asked (RFC 7143, section 12.1.3).

use md5::Md5;
use secret::Secret;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use sha3::Sha3_256;
use subtle::ConstantTimeEq;
use wire_iscsi::TextWriter;
use wire_iscsi::text::{binary, number, to_hex};

/// Bytes of a challenge of the target.
const CHALLENGE_BYTES: usize = 16;
/// Longest challenge of an initiator (RFC 7143, section 12.1.3).
const CHALLENGE_BYTES_MAX: usize = 1024;
/// Longest response.
const RESPONSE_BYTES_MAX: usize = 32;

/// What an initiator and the target know of each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChapCredentials {
    /// The initiator's user name.
    pub user: String,
    /// Its secret.
    pub secret: Secret,
    /// The target's user name and secret, for initiators that ask the target to authenticate itself.
    pub mutual: Option<(String, Secret)>,
}

/// Credentials under a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AuthGroup {
    pub(crate) tag: u32,
    pub(crate) credentials: Vec<ChapCredentials>,
}

/// Whether initiators have to authenticate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuthPolicy {
    /// No authentication, even if an initiator proposes it.
    pub disabled: bool,
    /// Initiators have to authenticate.
    pub required: bool,
    /// They have to ask the target to authenticate itself.
    pub mutual: bool,
    /// The tag of the authentication group; 0 for none.
    pub group: u32,
}

/// A hash function, with its number in CHAP_A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Algorithm {
    Md5 = 5,
    Sha1 = 6,
    Sha256 = 7,
    Sha3 = 8,
}

impl Algorithm {
    const ALL: [Algorithm; 4] = [Algorithm::Md5, Algorithm::Sha1, Algorithm::Sha256, Algorithm::Sha3];

    /// The response to a challenge: the hash of identifier, secret and challenge.
    fn respond(self, identifier: u8, secret: &Secret, challenge: &[u8]) -> Vec<u8> {
        let parts = [&[identifier], secret.reveal(), challenge];
        fn hash<D: Digest>(parts: [&[u8]; 3]) -> Vec<u8> {
            let mut digest = D::new();
            parts.iter().for_each(|part| digest.update(part));
            digest.finalize().to_vec()
        }
        match self {
            Algorithm::Md5 => hash::<Md5>(parts),
            Algorithm::Sha1 => hash::<Sha1>(parts),
            Algorithm::Sha256 => hash::<Sha256>(parts),
            Algorithm::Sha3 => hash::<Sha3_256>(parts),
        }
    }
}

/// A key of CHAP that the initiator has sent, in the order of the exchange.
#[derive(Debug, Default)]
pub(crate) struct ChapKeys<'a> {
    pub(crate) algorithms: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) response: Option<&'a str>,
    pub(crate) identifier: Option<&'a str>,
    pub(crate) challenge: Option<&'a str>,
}

/// The initiator could not be authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotAuthentic;

/// The exchange of a login: the initiator lists algorithms, the target challenges, the initiator responds.
#[derive(Debug)]
pub(crate) struct ChapExchange {
    credentials: Vec<ChapCredentials>,
    needs_mutual: bool,
    challenge: Option<(Algorithm, u8, [u8; CHALLENGE_BYTES])>,
    is_authentic: bool,
}

impl<'a> ChapKeys<'a> {
    /// Keeps a key. Returns whether it is one of CHAP.
    pub(crate) fn take(&mut self, key: &str, value: &'a str) -> bool {
        let place = match key {
            "CHAP_A" => &mut self.algorithms,
            "CHAP_N" => &mut self.name,
            "CHAP_R" => &mut self.response,
            "CHAP_I" => &mut self.identifier,
            "CHAP_C" => &mut self.challenge,
            _ => return false,
        };
        *place = Some(value);
        true
    }

    fn is_empty(&self) -> bool {
        self.algorithms.is_none() && self.name.is_none() && self.response.is_none()
    }
}

impl ChapExchange {
    pub(crate) fn new(credentials: Vec<ChapCredentials>, needs_mutual: bool) -> ChapExchange {
        ChapExchange { credentials, needs_mutual, challenge: None, is_authentic: false }
    }

    pub(crate) fn is_authentic(&self) -> bool {
        self.is_authentic
    }

    /// Handles the keys of a request.
    pub(crate) fn advance(
        &mut self,
        keys: &ChapKeys<'_>,
        answers: &mut TextWriter,
    ) -> Result<(), NotAuthentic> {
        if keys.is_empty() {
            return Ok(());
        }
        if let (Some(algorithms), None) = (keys.algorithms, self.challenge) {
            let offered = algorithms.split(',').filter_map(|number| number.trim().parse::<u8>().ok());
            let known = |number: u8| Algorithm::ALL.into_iter().find(|one| *one as u8 == number);
            let algorithm = offered.filter_map(known).next().ok_or(NotAuthentic)?;
            let mut random = [0; CHALLENGE_BYTES + 1];
            getrandom::fill(&mut random).map_err(|_| NotAuthentic)?;
            let [identifier, challenge @ ..] = random;
            self.challenge = Some((algorithm, identifier, challenge));
            answers.push("CHAP_A", &(algorithm as u8).to_string());
            answers.push("CHAP_I", &identifier.to_string());
            answers.push("CHAP_C", &to_hex(&challenge));
            return Ok(());
        }
        let (Some(name), Some(response)) = (keys.name, keys.response) else { return Err(NotAuthentic) };
        // Each challenge has one response.
        let (algorithm, identifier, challenge) = self.challenge.take().ok_or(NotAuthentic)?;
        let response = binary(response, RESPONSE_BYTES_MAX).map_err(|_| NotAuthentic)?;
        let credentials = self.credentials.iter().find(|one| one.user == name).ok_or(NotAuthentic)?;
        let expected = algorithm.respond(identifier, &credentials.secret, &challenge);
        if !bool::from(expected.ct_eq(&response)) {
            return Err(NotAuthentic);
        }
        match (keys.identifier, keys.challenge) {
            (Some(identifier), Some(other)) => {
                let identifier = number(identifier).ok().and_then(|number| u8::try_from(number).ok());
                let other = binary(other, CHALLENGE_BYTES_MAX).map_err(|_| NotAuthentic)?;
                let (Some(identifier), Some((user, secret))) = (identifier, &credentials.mutual) else {
                    return Err(NotAuthentic);
                };
                if other == challenge {
                    // Its own challenge, reflected: the answer to it would be what the initiator lacks.
                    return Err(NotAuthentic);
                }
                answers.push("CHAP_N", user);
                answers.push("CHAP_R", &to_hex(&algorithm.respond(identifier, secret, &other)));
            }
            (None, None) if !self.needs_mutual => {}
            _ => return Err(NotAuthentic),
        }
        self.is_authentic = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wire_iscsi::TextKeys;

    use super::*;

    fn credentials() -> Vec<ChapCredentials> {
        let mutual = Some(("target".to_string(), Secret::new("fedcba9876543210")));
        vec![ChapCredentials { user: "host".to_string(), secret: Secret::new("0123456789abcdef"), mutual }]
    }

    /// The value of a key of an answer.
    fn value(answers: &TextWriter, key: &str) -> Option<String> {
        let pairs = TextKeys::new(answers.bytes()).map(|pair| pair.unwrap());
        pairs.filter(|(name, _)| *name == key).map(|(_, value)| value.to_string()).next()
    }

    /// Asks for an algorithm; the exchange, identifier and challenge.
    fn challenged(needs_mutual: bool, algorithms: &str) -> (ChapExchange, u8, Vec<u8>) {
        let mut exchange = ChapExchange::new(credentials(), needs_mutual);
        let mut answers = TextWriter::default();
        let keys = ChapKeys { algorithms: Some(algorithms), ..ChapKeys::default() };
        exchange.advance(&keys, &mut answers).unwrap();
        let identifier = value(&answers, "CHAP_I").unwrap().parse().unwrap();
        (exchange, identifier, binary(&value(&answers, "CHAP_C").unwrap(), 16).unwrap())
    }

    #[test]
    fn responses_are_those_of_other_implementations() {
        // python3 -c 'import hashlib; print(hashlib.md5(bytes([7]) + b"0123456789abcdef" + bytes(range(16))).hexdigest())'
        for (algorithm, expected) in [
            (Algorithm::Md5, "0x86bb99a6fb1680ed708b78e577a63162"),
            (Algorithm::Sha1, "0x8adb46a9b7af7293e891975924251f79c64286f8"),
            (Algorithm::Sha256, "0x07e16dfab3d4277cb48c0349712e8646f259b11a427a3ad9d782b50aeefbda4c"),
            (Algorithm::Sha3, "0xb2b7777e300d74bd9c2fab7413b9cfa9407e5a242f79b55e716bfbc2a9dabb05"),
        ] {
            let challenge: Vec<u8> = (0..16).collect();
            let response = algorithm.respond(7, &credentials()[0].secret, &challenge);
            assert_eq!(to_hex(&response), expected);
        }
    }

    #[test]
    fn the_right_secret_is_accepted_once_and_no_other() {
        for (algorithms, algorithm) in [
            ("5", Algorithm::Md5),
            ("9,7,5", Algorithm::Sha256),
            ("6", Algorithm::Sha1),
            ("8", Algorithm::Sha3),
        ] {
            for (user, secret, accepted) in [
                ("host", "0123456789abcdef", true),
                ("host", "0123456789abcdee", false),
                ("other", "0123456789abcdef", false),
            ] {
                let (mut exchange, identifier, challenge) = challenged(false, algorithms);
                let secret = Secret::new(secret);
                let response = to_hex(&algorithm.respond(identifier, &secret, &challenge));
                let keys = ChapKeys { name: Some(user), response: Some(&response), ..ChapKeys::default() };
                let mut answers = TextWriter::default();
                assert_eq!(exchange.advance(&keys, &mut answers).is_ok(), accepted);
                assert_eq!((exchange.is_authentic(), answers.bytes()), (accepted, &[][..]));
                assert_eq!(exchange.advance(&keys, &mut answers), Err(NotAuthentic));
            }
        }
        let mut exchange = ChapExchange::new(credentials(), false);
        let none = ChapKeys { algorithms: Some("1,2"), ..ChapKeys::default() };
        assert_eq!(exchange.advance(&none, &mut TextWriter::default()), Err(NotAuthentic));
        let early = ChapKeys { name: Some("host"), response: Some("0x00"), ..ChapKeys::default() };
        assert_eq!(exchange.advance(&early, &mut TextWriter::default()), Err(NotAuthentic));
    }

    #[test]
    fn the_target_authenticates_itself_and_does_not_answer_its_own_challenge() {
        let (mut exchange, identifier, challenge) = challenged(true, "7");
        let response = to_hex(&Algorithm::Sha256.respond(identifier, &credentials()[0].secret, &challenge));
        let keys = ChapKeys { name: Some("host"), response: Some(&response), ..ChapKeys::default() };
        assert_eq!(
            exchange.advance(&keys, &mut TextWriter::default()),
            Err(NotAuthentic),
            "mutual is required"
        );

        for (reflected, accepted) in [(false, true), (true, false)] {
            let (mut exchange, identifier, challenge) = challenged(true, "7");
            let response =
                to_hex(&Algorithm::Sha256.respond(identifier, &credentials()[0].secret, &challenge));
            let own = if reflected { challenge } else { vec![9; 20] };
            let own_text = to_hex(&own);
            let keys = ChapKeys {
                name: Some("host"),
                response: Some(&response),
                identifier: Some("3"),
                challenge: Some(&own_text),
                algorithms: None,
            };
            let mut answers = TextWriter::default();
            assert_eq!(exchange.advance(&keys, &mut answers).is_ok(), accepted);
            if accepted {
                let mutual = Secret::new("fedcba9876543210");
                let expected = to_hex(&Algorithm::Sha256.respond(3, &mutual, &own));
                assert_eq!(value(&answers, "CHAP_R"), Some(expected));
                assert_eq!(value(&answers, "CHAP_N").as_deref(), Some("target"));
            }
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        assert!(!format!("{:?}", credentials()).contains("0123"));
    }
}
