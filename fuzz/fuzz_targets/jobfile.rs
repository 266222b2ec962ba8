//! Job files and results of other tools. A parsed job file round-trips through its options, and imported rows
//! have all columns.
#![no_main]

use libfuzzer_sys::fuzz_target;
use workload::jobfile::{Lookup, plan};

/// One file, which may include itself; every variable with a short name is 4.
struct SingleFile<'a>(&'a str);

impl Lookup for SingleFile<'_> {
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
    if let Ok(first) = plan(&words, &SingleFile(text)) {
        for job in &first.jobs {
            let mut written = String::from("[j]\n");
            for (name, value) in first.globals.iter().chain(&job.options) {
                written.push_str(&format!("{name}={value}\n"));
            }
            let second = plan(&words, &SingleFile(&written));
            assert!(second.is_ok(), "{text:?}: {written:?}: {:?}", second.err());
        }
    }
    if let Ok(rows) = workload::import::rows(text) {
        assert!(rows.iter().all(|row| row.values().len() == workload::import::COLUMNS.len()));
    }
});
