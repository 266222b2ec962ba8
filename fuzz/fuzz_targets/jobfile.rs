//! Job files and other tools' results. What is planned is planned again when it is written out, and what
//! is imported has numbers that can be printed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use workload::jobfile::{Lookup, plan};

/// One file, which may include itself, and no variables.
struct Only<'a>(&'a str);

impl Lookup for Only<'_> {
    fn file(&self, path: &str) -> Result<String, String> {
        if path == "a" { Ok(self.0.to_string()) } else { Err(format!("{path}: no such file")) }
    }

    fn variable(&self, name: &str) -> Option<String> {
        (name.len() < 3).then(|| "4".to_string())
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let words = ["a".to_string()];
    if let Ok(first) = plan(&words, &Only(text)) {
        for job in &first.jobs {
            let mut again = String::from("[j]\n");
            for (name, value) in first.globals.iter().chain(&job.options) {
                again.push_str(&format!("{name}={value}\n"));
            }
            let second = plan(&words, &Only(&again));
            assert!(second.is_ok(), "{text:?}: {again:?}: {:?}", second.err());
        }
    }
    if let Ok(rows) = workload::import::rows(text) {
        assert!(rows.iter().all(|row| row.values().len() == workload::import::COLUMNS.len()));
    }
});
