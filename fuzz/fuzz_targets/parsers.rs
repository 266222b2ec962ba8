//! User input: URIs, NQNs and CPU sets. Parsed values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(uri) = text.parse::<nvme::Uri>() {
        assert!(uri.nsid() > 0, "{text:?}: {uri:?}");
        assert_eq!(uri.to_string().parse().as_ref(), Ok(&uri), "{text:?}");
    }
    if let Ok(cpus) = text.parse::<os::CpuSet>() {
        assert!(cpus.cpus().is_sorted_by(|one, next| one < next), "{text:?}: {:?}", cpus.cpus());
        assert_eq!(cpus.to_string().parse().as_ref(), Ok(&cpus), "{text:?}");
    }
    if let Ok(name) = wire_nvme::fabrics::Nqn::new(text) {
        assert_eq!(name.as_str(), text);
    }
});
