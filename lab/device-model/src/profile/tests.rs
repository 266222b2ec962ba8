use proptest::prelude::*;

use super::*;

fn error(text: &str) -> String {
    DeviceProfile::parse(text).unwrap_err().to_string()
}

fn ideal() -> &'static str {
    DeviceProfile::shipped_text("ideal").unwrap()
}

#[test]
fn shipped_profiles_are_valid_and_named_like_their_files() {
    for name in DeviceProfile::shipped_names() {
        let profile = DeviceProfile::shipped(name).unwrap();
        assert_eq!(profile.name, name);
        assert!(!profile.target.is_empty(), "{name} has no targets");
        assert!(profile.target.iter().all(|target| !target.source.is_empty()), "{name}");
    }
    let unknown = DeviceProfile::shipped("intel-p5800x").unwrap_err().to_string();
    assert!(unknown.contains("intel-p4800x"), "{unknown}");
}

#[test]
fn an_invalid_value_error_names_the_key() {
    let cases = [
        ("schema = 1", "schema = 2", "schema: 2 is not 1"),
        ("read_iops = 1e6", "read_iops = 0.0", "front.read_iops: 0 is not between"),
        ("read_iops = 1e6", "read_iops = nan", "front.read_iops: NaN is not between"),
        ("read_iops = 1e6", "read_iop = 1e6", "unknown field `read_iop`"),
        ("read_iops = 1e6", "", "missing field `read_iops`"),
        ("capacity_gb = 100.0", "capacity_gb = -1.0", "device.capacity_gb"),
        ("name = \"ideal\"", "name = \"a b\"", "name: must be 1 to 64"),
        ("[{ us = 10.0 }]", "[{ us = 10.0, exp_us = 1.0, sigma = 1.0 }]", "read.path_us[0].exp_us"),
        ("[{ us = 10.0 }]", "[{ us = 1e9 }]", "read.path_us[0].us"),
        ("[{ us = 10.0 }]", "[{ us = 1.0 }]\ndie_us = [{ us = 1.0 }]", "read.die_us: there are no dies"),
        ("qd = 1\n", "qd = 0\n", "target[0].qd: 0"),
        ("metric = \"mean_us\"", "metric = \"mean\"", "unknown variant `mean`"),
    ];
    for (from, to, expected) in cases {
        assert!(ideal().contains(from), "{from}");
        let message = error(&ideal().replacen(from, to, 1));
        assert!(message.contains(expected), "{message}");
    }
    let slc = format!("{}\n[slc]\ngb = 1.0\nprogram_us = 1.0\n", ideal());
    assert!(error(&slc).starts_with("slc: only for devices with a write buffer"));
    let rule = format!("{}\n[[faults]]\nkind = \"media_error\"\nrate = 2.0\n", ideal());
    assert!(error(&rule).starts_with("faults[0].rate"));
}

#[test]
fn an_invalid_value_error_names_the_line() {
    let cases = [
        ("read_iops = 1e6", "read_iops = 0.0"),
        ("capacity_gb = 100.0", "capacity_gb = -1.0"),
        ("[{ us = 10.0 }]", "[{ us = 1e9 }]"),
        ("schema = 1", "schema = 2"),
        ("rw = \"randwrite\"", "rw = \"randwrite\"\nhost_us = -1.0"),
    ];
    for (from, to) in cases {
        let text = ideal().replacen(from, to, 1);
        let last = to.lines().last().unwrap();
        let line = text.lines().position(|line| line.contains(last)).unwrap() + 1;
        let message = error(&text);
        assert!(message.ends_with(&format!("(line {line})")), "{to}: {message}");
    }
}

#[test]
fn the_example_profile_in_the_manual_meets_its_target() {
    let manual = include_str!("../../../../docs/MODEL.md");
    let text = manual.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let profile = DeviceProfile::parse(text).unwrap();
    assert_eq!((profile.name.as_str(), profile.faults.len()), ("my-drive", 1));
    let report = crate::fit(&profile, &crate::FitEffort::QUICK, 1);
    assert_eq!((report.met_count(), report.rows.len()), (1, 1), "{report:#?}");
}

proptest! {
    #[test]
    fn parsing_arbitrary_text_never_panics(text in "\\PC{0,200}") {
        let _ = DeviceProfile::parse(&text);
    }

    /// A profile with one value replaced is rejected or gives a model that completes every command.
    #[test]
    fn any_value_is_rejected_or_gives_a_working_model(
        which in 0usize..80,
        number in prop_oneof![
            Just(0.0), Just(-1.0), Just(1e300), Just(f64::INFINITY), 0.0..1e7f64, 0.0..2.0f64
        ],
        seed in any::<u64>(),
    ) {
        let text = DeviceProfile::shipped_text("samsung-980-pro").unwrap();
        let head = text.split("[[target]]").next().unwrap();
        let mut table: toml::Table = head.parse().unwrap();
        let mut seen = 0;
        for (_, value) in table.iter_mut() {
            replace(value, which, &mut seen, number);
        }
        let Ok(profile) = DeviceProfile::parse(&table.to_string()) else { return Ok(()) };
        let mut model = crate::DeviceModel::with_state(&profile, 64 << 20, MediaState::Fresh, seed);
        let mut done = Vec::new();
        for index in 0..200u64 {
            let op = [block_io::Op::Read, block_io::Op::Write, block_io::Op::Flush, block_io::Op::Unmap][index as usize % 4];
            let io = crate::IoCommand { op, offset: index % 16 * 65_536, bytes: 65_536, fua: index % 8 == 1 };
            prop_assert!(model.submit(index * 1000, &io).is_some());
        }
        prop_assert_eq!(model.poll(u64::MAX, &mut done), 200);
    }
}

/// Replaces the `which`th number of a TOML value, counted depth first.
fn replace(value: &mut toml::Value, which: usize, seen: &mut usize, number: f64) {
    match value {
        toml::Value::Float(_) | toml::Value::Integer(_) => {
            if *seen == which {
                *value = toml::Value::Float(number);
            }
            *seen += 1;
        }
        toml::Value::Array(array) => array.iter_mut().for_each(|value| replace(value, which, seen, number)),
        toml::Value::Table(table) => {
            table.iter_mut().for_each(|(_, value)| replace(value, which, seen, number));
        }
        _ => {}
    }
}
