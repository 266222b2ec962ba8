//! Diffie-Hellman in the groups of RFC 7919. The time depends on the group only.

mod primes;

use std::sync::OnceLock;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use subtle::ConstantTimeEq;
use wire_nvme::auth::DhGroup;
use zeroize::{Zeroize, Zeroizing};

use crate::nonces::{NoRandomness, Nonces};

/// The generator of all groups.
const GENERATOR: u8 = 2;

/// A secret exponent of one exchange, and its public value.
pub(crate) struct DhSecret {
    group: DhGroup,
    exponent: BoxedUint,
    /// Big-endian, as long as the prime; empty in the null group.
    pub(crate) public: Vec<u8>,
}

impl Drop for DhSecret {
    fn drop(&mut self) {
        self.exponent.zeroize();
    }
}

/// A public value that no honest peer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadValue;

impl DhSecret {
    /// A new secret. Its exponent has twice the group's strength and no more (RFC 7919, section 5.2): ffdhe8192 then
    /// costs a twentieth of what an exponent as long as the prime costs.
    pub(crate) fn new(group: DhGroup, nonces: &mut dyn Nonces) -> Result<DhSecret, NoRandomness> {
        let bits = exponent_bits(group);
        let mut bytes = Zeroizing::new(vec![0; bits as usize / 8]);
        nonces.fill(&mut bytes)?;
        // Neither 0 nor small.
        if let Some(first) = bytes.first_mut() {
            *first |= 0x80;
        }
        let exponent = BoxedUint::from_be_slice_truncated(&bytes, bits.max(64));
        let mut secret = DhSecret { group, exponent, public: Vec::new() };
        if let Some(params) = params(group) {
            let base = BoxedUint::from_be_slice_truncated(&[GENERATOR], params.bits_precision());
            secret.public = secret.power(base, params).to_vec();
        }
        Ok(secret)
    }

    pub(crate) fn group(&self) -> DhGroup {
        self.group
    }

    /// The value that both ends have, big-endian and as long as the prime; `None` in the null group.
    pub(crate) fn shared(&self, of_peer: &[u8]) -> Result<Option<Zeroizing<Vec<u8>>>, BadValue> {
        let Some(params) = params(self.group) else {
            return if of_peer.is_empty() { Ok(None) } else { Err(BadValue) };
        };
        if of_peer.len() != self.group.bytes() {
            return Err(BadValue);
        }
        let value = BoxedUint::from_be_slice_truncated(of_peer, params.bits_precision());
        // RFC 7919, section 5.1: 1 < value < p - 1. The peer's own value would be a reflection.
        let prime = params.modulus().as_ref();
        let low = BoxedUint::one_with_precision(params.bits_precision());
        let high = prime.wrapping_sub(&low);
        let is_own: bool = of_peer.ct_eq(&self.public).into();
        if value <= low || value >= high || is_own {
            return Err(BadValue);
        }
        Ok(Some(self.power(value, params)))
    }

    fn power(&self, base: BoxedUint, params: &BoxedMontyParams) -> Zeroizing<Vec<u8>> {
        let base = BoxedMontyForm::new(base, params);
        let mut power = base.pow_bounded_exp(&self.exponent, exponent_bits(self.group));
        let mut value = power.retrieve();
        let bytes = Zeroizing::new(value.to_be_bytes().into_vec());
        value.zeroize();
        power.zeroize();
        bytes
    }
}

/// RFC 7919, appendix A: the least that an exponent may have, in whole words.
fn exponent_bits(group: DhGroup) -> u32 {
    match group {
        DhGroup::Null => 0,
        DhGroup::Ffdhe2048 => 256,
        DhGroup::Ffdhe3072 => 320,
        DhGroup::Ffdhe4096 => 384,
        DhGroup::Ffdhe6144 => 384,
        DhGroup::Ffdhe8192 => 448,
    }
}

/// The prime of a group with what is precomputed of it; `None` for the null group.
fn params(group: DhGroup) -> Option<&'static BoxedMontyParams> {
    static ALL: [OnceLock<BoxedMontyParams>; 5] = [const { OnceLock::new() }; 5];
    let (index, digits) = match group {
        DhGroup::Null => return None,
        DhGroup::Ffdhe2048 => (0, primes::FFDHE2048),
        DhGroup::Ffdhe3072 => (1, primes::FFDHE3072),
        DhGroup::Ffdhe4096 => (2, primes::FFDHE4096),
        DhGroup::Ffdhe6144 => (3, primes::FFDHE6144),
        DhGroup::Ffdhe8192 => (4, primes::FFDHE8192),
    };
    Some(ALL[index].get_or_init(|| {
        let prime = BoxedUint::from_be_hex(digits, group.bytes() as u32 * 8);
        let prime = Odd::new(prime.into_option().expect("the constant is hexadecimal"));
        BoxedMontyParams::new_vartime(prime.into_option().expect("a prime is odd"))
    }))
}
