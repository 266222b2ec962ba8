//! Kernel symbols by address (/proc/kallsyms).

use std::fs;
use std::path::Path;

/// Maximum number of symbols read: four times those of a kernel with all modules.
const SYMBOLS_MAX: usize = 2_000_000;

/// Kernel functions sorted by start address.
#[derive(Clone, Debug, Default)]
pub struct KernelSymbols {
    sorted: Vec<(u64, String)>,
}

impl KernelSymbols {
    /// Reads a file such as `/proc/kallsyms`. Empty if the file cannot be read or the kernel hides
    /// addresses.
    pub fn read(path: &Path) -> KernelSymbols {
        KernelSymbols::parse(&fs::read_to_string(path).unwrap_or_default())
    }

    /// Parses the text of `/proc/kallsyms`.
    pub fn parse(text: &str) -> KernelSymbols {
        let mut sorted: Vec<(u64, String)> = text
            .lines()
            .take(SYMBOLS_MAX)
            .filter_map(|line| {
                let mut words = line.split_whitespace();
                let address = u64::from_str_radix(words.next()?, 16).ok()?;
                let kind = words.next()?;
                // Hidden addresses (kptr_restrict) are zero.
                let code = matches!(kind, "t" | "T" | "w" | "W") && address != 0;
                code.then_some(())?;
                Some((address, words.next()?.to_string()))
            })
            .collect();
        sorted.sort();
        KernelSymbols { sorted }
    }

    /// Whether there are no symbols.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// The function that contains `address`.
    pub fn function_at(&self, address: u64) -> Option<&str> {
        let next = self.sorted.partition_point(|(start, _)| *start <= address);
        self.sorted.get(next.checked_sub(1)?).map(|(_, name)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_maps_to_the_nearest_preceding_function() {
        let symbols = KernelSymbols::parse(
            "ffffffff81000000 T first\nffffffff81000200 t third\t[nvme]\nffffffff81000100 T second\n\
             ffffffff81000180 d data\n0000000000000000 T hidden\nnonsense\n",
        );
        assert_eq!(symbols.function_at(0xffff_ffff_8100_00ff), Some("first"));
        assert_eq!(symbols.function_at(0xffff_ffff_8100_0100), Some("second"));
        assert_eq!(symbols.function_at(0xffff_ffff_8100_0190), Some("second"), "data symbols are skipped");
        assert_eq!(symbols.function_at(u64::MAX), Some("third"));
        assert_eq!(symbols.function_at(5), None);
        assert!(KernelSymbols::parse("0000000000000000 T hidden").is_empty());
    }
}
