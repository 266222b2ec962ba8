//! PCI addresses: domain, bus, device, function.

use std::fmt;
use std::str::FromStr;

/// The address of a PCI function, written `0000:00:03.0`.
///
/// Ordered as in `lspci`. Domains above 0xffff are those of Intel VMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The text is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a PCI address such as 0000:00:03.0 or 00:03.0")]
pub struct PciAddressError(String);

impl PciAddress {
    /// Devices per bus.
    const DEVICES: u8 = 32;
    /// Functions per device.
    const FUNCTIONS: u8 = 8;

    /// `None` if the device is above 31 or the function above 7.
    pub fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<PciAddress> {
        let inside = device < Self::DEVICES && function < Self::FUNCTIONS;
        inside.then_some(PciAddress { domain, bus, device, function })
    }

    /// The PCI domain (segment).
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// The bus number.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// The device number, 0 to 31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// The function number, 0 to 7.
    pub fn function(self) -> u8 {
        self.function
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<PciAddress, PciAddressError> {
        parse(text).ok_or_else(|| PciAddressError(text.chars().take(64).collect()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = match rest.split_once(':') {
        Some((domain, bus)) => (hexadecimal(domain, 4, 8)?, bus),
        None => (0, rest),
    };
    let (bus, device) = (hexadecimal(bus, 2, 2)?, hexadecimal(device, 2, 2)?);
    let function = hexadecimal(function, 1, 1)?;
    PciAddress::new(domain, bus as u8, device as u8, function as u8)
}

/// Parses `digits_min` to `digits_max` hexadecimal digits; rejects signs and blanks.
fn hexadecimal(text: &str, digits_min: usize, digits_max: usize) -> Option<u32> {
    let digits =
        (digits_min..=digits_max).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_in_lspci_notation_are_parsed() {
        for (text, expected) in [
            ("0000:00:03.0", (0, 0, 3, 0)),
            ("00:03.0", (0, 0, 3, 0)),
            ("10000:e1:1f.7", (0x10000, 0xe1, 31, 7)),
            ("ABCD:ef:10.1", (0xabcd, 0xef, 16, 1)),
        ] {
            let (domain, bus, device, function) = expected;
            assert_eq!(text.parse(), Ok(PciAddress { domain, bus, device, function }), "{text}");
        }
    }

    #[test]
    fn invalid_addresses_are_rejected() {
        for text in [
            "",
            ".",
            ":.",
            "00:03",
            "00:03.8",
            "00:20.0",
            "0:03.0",
            "+0:03.0",
            "0000:00:03.0 ",
            "00:03.00",
            "0000:00:00:03.0",
            "100000000:00:03.0",
            "gg:03.0",
            "0000::03.0",
            "nvme0",
            "../..:03.0",
        ] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn display_and_parse_round_trip(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = PciAddress::new(domain, bus, device, function).unwrap();
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn arbitrary_text_never_panics(text in "\\PC{0,40}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }

        #[test]
        fn address_like_text_parses_to_the_same_address(text in "[0-9a-f:.]{0,16}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert!(address.to_string().ends_with(&text.to_lowercase()));
            }
        }
    }
}
