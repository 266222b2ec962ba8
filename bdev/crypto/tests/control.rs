//! Methods of encrypted bdevs, their keys, and the engine that encrypts.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use block_io::Status;
use control::ConfigFile;
use control::json::{Value, json};
use rig::{KEY, KEY2, Program};

#[test]
fn calls_that_fail_change_nothing() {
    let program = Program::with_device(64);
    program.malloc("large", 4, 128 << 10);
    let protected = json!({ "name": "protected", "num_blocks": 64, "block_size": 512, "md_size": 8,
        "md_interleave": true, "dif_type": 1 });
    program.call("bdev_malloc_create", protected);
    program.malloc("free", 64, 512);
    let before = (program.plane.save(), program.registry.claims());
    for (params, code, message) in [
        (json!({ "base_bdev_name": "free", "name": "d" }), -32602, "a key is given either by value"),
        (
            json!({ "base_bdev_name": "free", "name": "d", "key": KEY, "key2": KEY2 }),
            -32602,
            "no engine has AES_CBC",
        ),
        (
            json!({ "base_bdev_name": "free", "name": "d", "key_name": "x" }),
            -32602,
            "key_name: no key is called x",
        ),
        (json!({ "base_bdev_name": "free", "key_name": "k" }), -32602, "name: required"),
        (json!({ "name": "d", "key_name": "k" }), -32602, "base_bdev_name: required"),
        (
            json!({ "base_bdev_name": "free", "name": "c", "key_name": "k" }),
            -17,
            "a bdev named c already exists",
        ),
        (
            json!({ "base_bdev_name": "base", "name": "d", "key_name": "k" }),
            -16,
            "base is claimed by crypto bdev c",
        ),
        (
            json!({ "base_bdev_name": "protected", "name": "d", "key_name": "k" }),
            -22,
            "protected has metadata",
        ),
        (json!({ "base_bdev_name": "large", "name": "d", "key_name": "k" }), -22, "more than 65536 bytes"),
        (
            json!({ "base_bdev_name": "free", "name": "d", "cipher": "AES_XTS", "key": KEY, "key2": KEY }),
            -32602,
            "not secure",
        ),
        (
            json!({ "base_bdev_name": "base", "name": "d", "cipher": "AES_XTS", "key": KEY, "key2": KEY2 }),
            -16,
            "claimed",
        ),
    ] {
        let (found, text) = program.failure("bdev_crypto_create", params.clone());
        assert!(found == code && text.contains(message), "{params}: {found} {text}");
    }
    assert_eq!(program.failure("bdev_crypto_delete", json!({ "name": "free" })).0, -19);
    assert_eq!(program.failure("bdev_crypto_delete", json!({ "name": "none" })).0, -19);
    assert_eq!((program.plane.save(), program.registry.claims()), before);
    assert_eq!(program.call("accel_crypto_keys_get", json!({})).as_array().unwrap().len(), 1);
}

#[test]
fn a_key_in_use_stays_until_the_last_bdev_with_it_is_gone() {
    let program = Program::with_device(64);
    // One that waits for its base uses it too.
    program.crypto("waits", "not there", "k");
    let destroy = || program.try_call("accel_crypto_key_destroy", json!({ "key_name": "k" }));
    assert_eq!(destroy().unwrap_err().code, -16);
    program.call("bdev_crypto_delete", json!({ "name": "waits" }));
    assert_eq!(destroy().unwrap_err().code, -16);
    program.write("c", 0, &[1; 512]);
    program.call("bdev_crypto_delete", json!({ "name": "c" }));
    destroy().unwrap();
    assert_eq!(program.call("accel_crypto_keys_get", json!({})), json!([]));
    assert!(program.registry.claims().is_empty());
}

#[test]
fn a_key_by_value_goes_with_its_bdev() {
    let program = Program::start();
    program.malloc("base", 64, 512);
    let params = json!({ "base_bdev_name": "base", "name": "c", "cipher": "AES_XTS", "key": KEY, "key2": KEY2,
        "crypto_pmd": "crypto_aesni_mb" });
    program.call("bdev_crypto_create", params.clone());
    assert_eq!(program.show("c")["driver_specific"]["crypto"]["key_name"], "c_AES_XTS");
    let saved = program.saved("bdev");
    assert_eq!(saved[1]["params"], json!({ "base_bdev_name": "base", "name": "c", "key_name": "c_AES_XTS" }));
    program.write("c", 0, &[1; 512]);
    program.call("bdev_crypto_delete", json!({ "name": "c" }));
    assert_eq!(program.call("accel_crypto_keys_get", json!({})), json!([]));
    program.key("k", KEY, KEY2);
    program.crypto("c", "base", "k");
    assert_eq!(program.read("c", 0, 512), [1; 512]);
}

#[test]
fn a_saved_configuration_makes_the_same_volumes() {
    let directory = std::env::temp_dir().join(format!("ringbolt-crypto-saved-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let program = Program::start();
    program.keyring.set_folder(&directory.join("keys")).unwrap();
    program.key("k", KEY, KEY2);
    let uuid = "e5e5e5e5-0000-4000-8000-000000000001";
    program.call(
        "bdev_malloc_create",
        json!({ "name": "base", "num_blocks": 64, "block_size": 512, "uuid": uuid }),
    );
    // By another name of the base.
    program.crypto("c", uuid, "k");
    program.crypto("waits", "not there", "k");
    program.write("c", 3, &[5; 1024]);
    let stored = program.read("base", 3, 1024);
    let config = program.plane.save();
    let text = config.to_string();
    assert!(!text.contains(KEY) && !text.contains(KEY2), "{text}");

    let second = Program::start();
    second.keyring.set_folder(&directory.join("keys")).unwrap();
    let file = ConfigFile::parse("saved.json", text.as_bytes(), second.plane.catalog()).unwrap();
    file.apply(&second.plane).unwrap();
    assert_eq!(second.plane.save(), config);
    assert_eq!(second.show("c")["uuid"], program.show("c")["uuid"]);
    second.write("c", 3, &[5; 1024]);
    assert_eq!(second.read("base", 3, 1024), stored);
    let (in_force, lines) = file.reload(&file, &second.plane);
    assert_eq!(lines, ["nothing has changed"]);
    // Without the bdevs and the key.
    let mut less = config.clone();
    for section in less["subsystems"].as_array_mut().unwrap() {
        let calls = section["config"].as_array_mut();
        calls.unwrap().retain(|call| !call["method"].as_str().unwrap().contains("crypto"));
    }
    let less = ConfigFile::parse("less.json", less.to_string().as_bytes(), second.plane.catalog()).unwrap();
    let (_, lines) = in_force.reload(&less, &second.plane);
    let removed = lines.iter().filter(|line| line.starts_with("removed: ")).count();
    assert_eq!((removed, lines.len()), (3, 3), "{lines:?}");
    assert!(second.registry.find("c").is_none());
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn an_engine_that_fails_fails_requests_and_shows_no_cipher_text() {
    let program = Program::with_device(64);
    program.write("c", 0, &[1; 4096]);
    let operation = |name: &str| {
        let stats = program.call("accel_get_stats", json!({}));
        stats["operations"].as_array().unwrap().iter().find(|one| one["opcode"] == name).cloned().unwrap()
    };
    let encrypt = json!({ "opcode": "encrypt", "module_name": "software", "executed": 1, "failed": 0, "num_bytes": 4096 });
    assert_eq!(operation("encrypt"), encrypt);
    let stored = program.read("base", 0, 4096);
    for (op, kind) in [("encrypt", "failure"), ("decrypt", "failure")] {
        program.call("accel_assign_opc", json!({ "opname": op, "module": "error" }));
        program.call("accel_error_inject_error", json!({ "opcode": op, "type": kind, "count": 1 }));
    }
    assert_eq!(program.try_write("c", 0, &[2; 4096]), Err(Status::INTERNAL_ERROR));
    assert_eq!(program.read("base", 0, 4096), stored);
    let read = program.with_channel("c", |core, io| async move {
        let buffer = core.pool().take(4096).unwrap();
        io.read(0, buffer).await.map(drop).map_err(|(status, buffer)| (status, buffer.as_slice().to_vec()))
    });
    assert_eq!(read, Err((Status::INTERNAL_ERROR, vec![0; 4096])));
    assert_eq!((&operation("encrypt")["failed"], &operation("decrypt")["failed"]), (&json!(1), &json!(1)));
    assert_eq!(operation("encrypt")["module_name"], "error");
    // A zero that cannot be encrypted is not written as a plain one.
    program.call("accel_error_inject_error", json!({ "opcode": "encrypt", "type": "failure", "count": 1 }));
    let status = program.with_channel("c", |_, io| async move { io.write_zeroes(0, 8).await });
    assert_eq!(status, Err(Status::INTERNAL_ERROR));
    assert_eq!(program.read("base", 0, 4096), stored);
    // Wrong results go unnoticed: that is what they are for.
    program.call("accel_error_inject_error", json!({ "opcode": "decrypt", "type": "corrupt", "count": 1 }));
    let data = program.read("c", 0, 4096);
    assert!(data[0] == 0 && data[1..].iter().all(|byte| *byte == 1));
    assert_eq!(program.read("c", 0, 4096), [1; 4096]);
}

#[test]
fn the_copies_of_malloc_devices_go_through_the_framework() {
    let program = Program::start();
    program.malloc("m", 64, 512);
    program.write("m", 0, &[3; 1024]);
    let copies = || program.call("accel_get_stats", json!({}))["operations"][0].clone();
    let counts = |module: &str, executed: u64, failed: u64, bytes: u64| json!({ "opcode": "copy", "module_name": module, "executed": executed, "failed": failed, "num_bytes": bytes });
    assert_eq!(copies(), counts("software", 1, 0, 1024));
    program.call("accel_assign_opc", json!({ "opname": "copy", "module": "error" }));
    assert_eq!(program.read("m", 0, 512), [3; 512]);
    let inject = |kind: &str| {
        program.call("accel_error_inject_error", json!({ "opcode": "copy", "type": kind, "count": 1 }));
    };
    inject("failure");
    assert_eq!(program.try_write("m", 0, &[4; 512]), Err(Status::INTERNAL_ERROR));
    assert_eq!(program.read("m", 0, 512), [3; 512]);
    inject("corrupt");
    assert_eq!(program.read("m", 0, 512)[..2], [2, 3]);
    inject("corrupt");
    program.write("m", 0, &[8; 512]);
    assert_eq!(program.read("m", 0, 512)[..2], [9, 8]);
    assert_eq!(copies(), counts("error", 6, 1, 1024 + 5 * 512));
}

#[test]
fn a_base_that_goes_under_load_takes_the_volume_along_and_brings_it_back() {
    let program = Program::with_device(4096);
    let (done, failed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    const WORKERS: usize = 16;
    for worker in 0..WORKERS {
        let descriptor = program.registry.open("c", bdev::Access::ReadWrite).unwrap();
        let (done, failed) = (done.clone(), failed.clone());
        let start = move |core: &reactor::Core| {
            let io = bdev::AsyncChannel::new(core, descriptor.channel(core).unwrap());
            let own = core.clone();
            core.spawn(async move {
                for round in 0u64.. {
                    let lba = (worker as u64 * 100 + round) % 4000;
                    let buffer = own.pool().take(4096).unwrap();
                    let result = match round % 4 {
                        0 => io.write(lba, buffer).await.map(drop).map_err(|(status, _)| status),
                        1 => io.write_zeroes(lba, 90).await,
                        2 => io.unmap(lba, 8).await,
                        _ => io.read(lba, buffer).await.map(drop).map_err(|(status, _)| status),
                    };
                    match result {
                        Ok(()) => _ = done.fetch_add(1, Ordering::Relaxed),
                        Err(_) => break,
                    }
                }
                failed.fetch_add(1, Ordering::Relaxed);
            });
        };
        program.reactors.handles()[0].post(start).unwrap();
    }
    let until = |what: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !what() {
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{} done, {} failed",
                done.load(Ordering::Relaxed),
                failed.load(Ordering::Relaxed)
            );
            std::thread::yield_now();
        }
    };
    until(&|| done.load(Ordering::Relaxed) > 1000);
    program.call("bdev_malloc_delete", json!({ "name": "base" }));
    until(&|| failed.load(Ordering::Relaxed) == WORKERS);
    program.wait();
    assert!(program.registry.find("c").is_none() && program.registry.claims().is_empty());
    // The call is remembered, and the key in use.
    assert_eq!(program.failure("accel_crypto_key_destroy", json!({ "key_name": "k" })).0, -16);
    program.malloc("base", 64, 512);
    program.wait();
    program.write("c", 0, &[7; 512]);
    assert_eq!(program.read("c", 0, 512), [7; 512]);
    let names: Vec<Value> = program.saved("bdev").iter().map(|call| call["method"].clone()).collect();
    assert_eq!(names, ["bdev_malloc_create", "bdev_crypto_create"]);
}
