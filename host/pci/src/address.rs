//! Where a function is: domain, bus, device, function.

use std::fmt;
use std::str::FromStr;

/// A function's place, written `0000:00:03.0`.
///
/// Ordered as `lspci` lists them. Domains above 0xffff are those of Intel's VMD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// A text that is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no PCI address, as 0000:00:03.0 or 00:03.0")]
pub struct AddressError(String);

impl Address {
    /// Devices of a bus.
    const DEVICES: u8 = 32;
    /// Functions of a device.
    const FUNCTIONS: u8 = 8;

    /// `None` if the device is above 31 or the function above 7.
    pub fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Address> {
        let inside = device < Self::DEVICES && function < Self::FUNCTIONS;
        inside.then_some(Address { domain, bus, device, function })
    }

    /// The PCI segment.
    pub fn domain(self) -> u32 {
        self.domain
    }

    /// The bus.
    pub fn bus(self) -> u8 {
        self.bus
    }

    /// The device on the bus, 0 to 31.
    pub fn device(self) -> u8 {
        self.device
    }

    /// The function of the device, 0 to 7.
    pub fn function(self) -> u8 {
        self.function
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        parse(text).ok_or_else(|| AddressError(text.chars().take(64).collect()))
    }
}

fn parse(text: &str) -> Option<Address> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = match rest.split_once(':') {
        Some((domain, bus)) => (hexadecimal(domain, 4, 8)?, bus),
        None => (0, rest),
    };
    let (bus, device) = (hexadecimal(bus, 2, 2)?, hexadecimal(device, 2, 2)?);
    let function = hexadecimal(function, 1, 1)?;
    Address::new(domain, bus as u8, device as u8, function as u8)
}

/// A number of so many digits and nothing else: no sign, no blank.
fn hexadecimal(text: &str, least: usize, most: usize) -> Option<u32> {
    let digits = (least..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn addresses_are_read_as_lspci_writes_them() {
        for (text, expected) in [
            ("0000:00:03.0", (0, 0, 3, 0)),
            ("00:03.0", (0, 0, 3, 0)),
            ("10000:e1:1f.7", (0x10000, 0xe1, 31, 7)),
            ("ABCD:ef:10.1", (0xabcd, 0xef, 16, 1)),
        ] {
            let (domain, bus, device, function) = expected;
            assert_eq!(text.parse(), Ok(Address { domain, bus, device, function }), "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
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
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = Address::new(domain, bus, device, function).unwrap();
            prop_assert_eq!(address.to_string().parse(), Ok(address));
        }

        #[test]
        fn any_text_is_an_address_or_refused(text in "\\PC{0,40}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }

        #[test]
        fn near_misses_do_no_harm(text in "[0-9a-f:.]{0,16}") {
            if let Ok(address) = text.parse::<Address>() {
                prop_assert!(address.to_string().ends_with(&text.to_lowercase()));
            }
        }
    }
}
