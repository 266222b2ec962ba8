//! Names, claims and events.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bdev::{Access, BdevError, BlockDevice, DeviceEvent, Registry, Uuid, delay, error, malloc, null};

fn two_devices() -> Registry {
    let registry = Registry::new();
    malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 1024, 512)).unwrap();
    null::create(&registry, null::NullConfig::new("Null0", 1024, 4096)).unwrap();
    registry
}

#[test]
fn a_device_is_found_by_name_alias_and_uuid() {
    let registry = two_devices();
    let uuid = Uuid::from_u128(7);
    let bdev = registry.find("Null0").unwrap().bdev().clone();
    registry.register("Other", Some(uuid), &["alias".to_string()], bdev.clone()).unwrap();
    for name in ["Other", "alias", "00000000-0000-0000-0000-000000000007"] {
        assert_eq!(registry.find(name).unwrap().name(), "Other", "{name}");
    }
    for (name, aliases) in [("Other", vec![]), ("alias", vec![]), ("New", vec!["Malloc0".to_string()])] {
        let again = registry.register(name, None, &aliases, bdev.clone());
        assert!(matches!(again, Err(BdevError::Exists { .. })), "{name}");
    }
    assert!(matches!(registry.register("New", Some(uuid), &[], bdev), Err(BdevError::Exists { .. })));
    let names: Vec<String> = registry.list().iter().map(|device| device.name().to_string()).collect();
    assert_eq!(names, ["Malloc0", "Null0", "Other"]);
}

#[test]
fn an_exclusive_claim_excludes_writers_and_admits_readers() {
    let registry = two_devices();
    let claim = registry.open("Malloc0", Access::Exclusive { by: "lvol" }).unwrap();
    assert_eq!(registry.claims(), [("Malloc0".to_string(), "lvol".to_string())]);
    let refused = registry.open("Malloc0", Access::ReadWrite).unwrap_err();
    assert_eq!(refused.to_string(), "Malloc0 is claimed by lvol");
    assert!(registry.open("Malloc0", Access::Exclusive { by: "gpt" }).is_err());
    let reader = registry.open("Malloc0", Access::ReadOnly).unwrap();
    assert_eq!(registry.find("Malloc0").unwrap().open_count(), 2);
    drop(claim);
    let writer = registry.open("Malloc0", Access::ReadWrite).unwrap();
    let refused = registry.open("Malloc0", Access::Exclusive { by: "gpt" }).unwrap_err();
    assert_eq!(refused.to_string(), "Malloc0 is claimed by 1 other writer(s)");
    drop((reader, writer));
    registry.open("Malloc0", Access::Exclusive { by: "gpt" }).unwrap();
    assert!(registry.claims().is_empty());
}

#[test]
fn subscribers_receive_events_until_they_unsubscribe() {
    let registry = Registry::new();
    let events = Arc::new(Mutex::new(Vec::new()));
    let sink = events.clone();
    let id = registry.subscribe(Box::new(move |event| {
        let change = match event {
            DeviceEvent::Registered(_) => "registered",
            DeviceEvent::Resized(_) => "resized",
            DeviceEvent::Removed(_) => "removed",
        };
        sink.lock().unwrap().push(format!("{} {change}", event.device().name()));
    }));
    null::create(&registry, null::NullConfig::new("a", 8, 512)).unwrap();
    registry.unregister("a").unwrap();
    registry.unsubscribe(id);
    null::create(&registry, null::NullConfig::new("b", 8, 512)).unwrap();
    assert_eq!(*events.lock().unwrap(), ["a registered", "a removed"]);
    assert!(matches!(registry.unregister("a"), Err(BdevError::NotFound { .. })));
}

#[test]
fn removing_a_base_removes_the_virtual_devices_on_it() {
    let registry = two_devices();
    let error = error::create(&registry, error::ErrorConfig::new("Malloc0")).unwrap();
    let delay = delay::create(&registry, delay::DelayConfig::new("EE_Malloc0", "Slow", 5)).unwrap();
    assert_eq!(error.name(), "EE_Malloc0");
    let claims = registry.claims();
    assert_eq!(claims[0], ("EE_Malloc0".to_string(), "delay bdev Slow".to_string()));
    assert_eq!(claims[1], ("Malloc0".to_string(), "error bdev EE_Malloc0".to_string()));
    assert!(registry.open("Malloc0", Access::ReadWrite).is_err());
    let base = registry.unregister("Malloc0").unwrap();
    assert!(error.is_removed() && delay.is_removed());
    assert_eq!(registry.list().len(), 1);
    assert!(base.wait_closed(Duration::ZERO), "all claims of the stack are released");
}

#[test]
fn removing_a_virtual_device_releases_its_base_once_it_is_closed() {
    let registry = two_devices();
    error::create(&registry, error::ErrorConfig::new("Malloc0")).unwrap();
    let open = registry.open("EE_Malloc0", Access::ReadWrite).unwrap();
    registry.unregister("EE_Malloc0").unwrap();
    assert!(registry.open("Malloc0", Access::ReadWrite).is_err(), "the virtual device is still open");
    drop(open);
    registry.open("Malloc0", Access::ReadWrite).unwrap();
}

#[test]
fn invalid_configurations_are_rejected_with_a_reason() {
    let registry = two_devices();
    let errors = [
        malloc::create(&registry, malloc::MallocConfig::new("Malloc0", 8, 512)).unwrap_err(),
        malloc::create(&registry, malloc::MallocConfig::new("x", 8, 500)).unwrap_err(),
        malloc::create(&registry, malloc::MallocConfig::new("x", 0, 512)).unwrap_err(),
        null::create(&registry, null::NullConfig::new("x", u64::MAX, 512)).unwrap_err(),
        null::create(&registry, null::NullConfig::new("", 8, 512)).unwrap_err(),
        error::create(&registry, error::ErrorConfig::new("nothing")).unwrap_err(),
        delay::create(
            &registry,
            delay::DelayConfig { p99_read_latency_us: 1, ..delay::DelayConfig::new("Null0", "d", 5) },
        )
        .unwrap_err(),
        error::clear(&registry, "Null0").unwrap_err(),
    ];
    let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "a bdev named Malloc0 already exists",
            "block_size: 500 is not a multiple of 512",
            "num_blocks: 0 blocks of 512 bytes is not a valid capacity",
            "num_blocks: 18446744073709551615 blocks of 512 bytes is not a valid capacity",
            "name: \"\" is not a name of 1 to 255 printable bytes",
            "no bdev is called nothing",
            "p99_read_latency: 1 us is below the average of 5 us",
            "Null0 is not an Error Injection Disk",
        ]
    );
    assert!(registry.claims().is_empty(), "a failed create holds no claim");
}

#[test]
fn prepared_reservations_are_those_of_the_device_that_is_opened_or_none() {
    let registry = Registry::new();
    let directory = std::env::temp_dir().join(format!("ringbolt-prepared-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join("ptpl");
    let create = || null::create(&registry, null::NullConfig::new("Null0", 64, 512)).unwrap();
    let device = create();
    let prepare = |device, file| registry.prepare_reservations(device, file).unwrap();
    let finish = |prepared, device: &BlockDevice| registry.finish_reservations(prepared, device).unwrap();
    let with_file = finish(prepare(Some(&*device), Some(&*file)), &device).unwrap();
    assert!(file.exists() && with_file.device() == device.uuid());
    drop(with_file);
    let without = finish(prepare(Some(&*device), None), &device).unwrap();
    assert_eq!(without.device(), device.uuid());
    drop(without);
    // A device that appears in between has reservations that the file does not keep.
    assert!(finish(prepare(None, Some(&*file)), &device).is_none());
    // So has another one of the same name.
    let prepared = prepare(Some(&*device), Some(&*file));
    registry.unregister("Null0").unwrap();
    assert!(finish(prepared, &create()).is_none());
    std::fs::remove_dir_all(directory).unwrap();
}
