//! The kernel's functions by address.

use std::fs;
use std::path::Path;

/// Most symbols that are read: a kernel with all modules has a quarter of that.
const SYMBOLS_MAX: usize = 2_000_000;

/// Function names by where they begin.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    sorted: Vec<(u64, String)>,
}

impl Symbols {
    /// Reads the running kernel's. Without the right to see addresses there are none.
    pub fn read(path: &Path) -> Symbols {
        Symbols::parse(&fs::read_to_string(path).unwrap_or_default())
    }

    /// From the text of `/proc/kallsyms`.
    pub fn parse(text: &str) -> Symbols {
        let mut sorted: Vec<(u64, String)> = text
            .lines()
            .take(SYMBOLS_MAX)
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let address = u64::from_str_radix(words.next()?, 16).ok()?;
                let kind = words.next()?;
                // Zero is what those see who may not see.
                let code = matches!(kind, "t" | "T" | "w" | "W") && address != 0;
                code.then_some(())?;
                Some((address, words.next()?.to_string()))
            })
            .collect();
        sorted.sort();
        Symbols { sorted }
    }

    /// Whether there are any.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// The function that an address is in.
    pub fn at(&self, address: u64) -> Option<&str> {
        let after = self.sorted.partition_point(|(start, _)| *start <= address);
        self.sorted.get(after.checked_sub(1)?).map(|(_, name)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_in_the_function_that_begins_before_it() {
        let symbols = Symbols::parse(
            "ffffffff81000000 T first\nffffffff81000200 t third\t[nvme]\nffffffff81000100 T second\n\
             ffffffff81000180 d data\n0000000000000000 T hidden\nnonsense\n",
        );
        assert_eq!(symbols.at(0xffff_ffff_8100_00ff), Some("first"));
        assert_eq!(symbols.at(0xffff_ffff_8100_0100), Some("second"));
        assert_eq!(symbols.at(0xffff_ffff_8100_0190), Some("second"), "data are no function");
        assert_eq!(symbols.at(u64::MAX), Some("third"));
        assert_eq!(symbols.at(5), None);
        assert!(Symbols::parse("0000000000000000 T hidden").is_empty());
    }
}
