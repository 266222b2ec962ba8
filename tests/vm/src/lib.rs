//! The tests that put the Linux kernel's own initiator, in a QEMU guest, before the target.
//!
//! They are Python and run by `tests/vm/run.py` (see the README beside it), not by Cargo: one
//! boot serves many cases, and a case drives the guest, the target and its RPC socket at once.
//! What Cargo runs here is the unit tests of that harness, which need neither QEMU nor a network.
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests {
    use std::process::Command;

    #[test]
    fn the_harness_passes_its_own_unit_tests() {
        let run = Command::new("python3")
            .args(["-B", "-m", "unittest", "discover", "-q", "-s", "unit", "-t", "."])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output();
        match run {
            Err(error) => eprintln!("skipped: python3 cannot be started ({error})"),
            Ok(output) => {
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
        }
    }
}
