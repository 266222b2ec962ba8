use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use control::{ConfigFile, ControlPlane, KeyringModule};

use super::*;

const KEY: &str = "000102030405060708090a0b0c0d0e0f";
const KEY2: &str = "6465666768696a6b6c6d6e6f70717273";

/// A control plane of the keyring and this module, with a directory that is removed on drop.
struct Program {
    plane: Arc<ControlPlane>,
    accel: Accel,
    keyring: Keyring,
    directory: PathBuf,
}

impl Program {
    fn new(name: &str) -> Program {
        let directory = std::env::temp_dir().join(format!("ringbolt-accel-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir_all(&directory).unwrap();
        Program::within(directory)
    }

    fn within(directory: PathBuf) -> Program {
        let (accel, keyring) = (Accel::default(), Keyring::default());
        let module = AccelModule::new(accel.clone(), keyring.clone());
        let builder = ControlPlane::builder(Vec::new());
        let builder = builder.module(&Arc::new(KeyringModule::new(keyring.clone()))).module(&module);
        Program { plane: builder.start(None).unwrap(), accel, keyring, directory }
    }

    fn call(&self, method: &str, params: Value) -> Value {
        self.plane.invoke(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    }

    fn failure(&self, method: &str, params: Value) -> (i64, String) {
        let error = self.plane.invoke(method, params.clone()).expect_err(&format!("{method} {params}"));
        (error.code, error.message)
    }

    fn saved(&self, subsystem: &str) -> Vec<Value> {
        self.call("framework_get_config", json!({ "name": subsystem })).as_array().unwrap().clone()
    }

    fn secret_file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }

    fn config(&self, sections: Value) -> ConfigFile {
        ConfigFile::parse(
            "t.json",
            json!({ "subsystems": sections }).to_string().as_bytes(),
            self.plane.catalog(),
        )
        .unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn by_value(name: &str) -> Value {
    json!({ "cipher": "AES_XTS", "key": KEY, "key2": KEY2, "name": name })
}

#[test]
fn results_have_spdks_shapes() {
    let program = Program::new("shapes");
    let assignments = program.call("accel_get_opc_assignments", json!({}));
    assert_eq!((&assignments["copy"], &assignments["encrypt"]), (&json!("software"), &json!("software")));
    assert_eq!(assignments.as_object().unwrap().len(), 15);
    let engines = program.call("accel_get_module_info", json!({}));
    assert_eq!(engines[0]["module"], "software");
    assert_eq!(engines[1]["module"], "error");
    assert!(engines[0]["supported ops"].as_array().unwrap().contains(&json!("dif_verify")));
    let stats = program.call("accel_get_stats", json!({}));
    assert_eq!(stats["operations"], json!([]));
    let members =
        ["sequence_executed", "sequence_failed", "sequence_outstanding", "task_outstanding", "retry_task"];
    assert!(members.iter().all(|member| stats[member] == 0), "{stats}");

    program.call("accel_crypto_key_create", by_value("k"));
    let masked = "*".repeat(32);
    let key = json!({ "name": "k", "cipher": "AES_XTS", "key": masked, "key2": masked, "tweak_mode": "SIMPLE_LBA" });
    assert_eq!(program.call("accel_crypto_keys_get", json!({})), json!([key]));
    assert_eq!(program.call("accel_crypto_keys_get", json!({ "key_name": "k" })), json!([key]));
    let (code, message) = program.failure("accel_crypto_keys_get", json!({ "key_name": "x" }));
    assert_eq!((code, message.as_str()), (-32602, "Invalid parameters: no key is called x"));
    assert_eq!(program.call("accel_set_driver", json!({ "name": "" })), json!(true));
    assert_eq!(program.failure("accel_set_driver", json!({ "name": "mlx5" })).0, -19);
}

#[test]
fn a_reassigned_operation_shows_in_statistics_and_takes_injected_errors() {
    let program = Program::new("reassigned");
    let channel = program.accel.channel(0);
    let operation = || program.call("accel_get_stats", json!({}))["operations"][0].clone();
    let crc = channel.crc32c(b"123456789").unwrap();
    let counts = |module: &str, executed: u64, failed: u64| {
        json!({ "opcode": "crc32c", "module_name": module, "executed": executed, "failed": failed,
            "num_bytes": executed * 9 })
    };
    assert_eq!(operation(), counts("software", 1, 0));
    let inject = json!({ "opcode": "crc32c", "type": "failure", "count": 1, "errcode": -12 });
    program.call("accel_error_inject_error", inject.clone());
    // Not while the CPU executes it.
    assert_eq!(channel.crc32c(b"123456789"), Ok(crc));
    program.call("accel_assign_opc", json!({ "opname": "crc32c", "module": "error" }));
    assert_eq!(program.call("accel_get_opc_assignments", json!({}))["crc32c"], "error");
    assert_eq!(channel.crc32c(b"123456789").unwrap_err(), crate::AccelFailure::Failed { errno: 12 });
    assert_eq!(channel.crc32c(b"123456789"), Ok(crc));
    assert_eq!(operation(), counts("error", 3, 1));
    program.call("accel_error_inject_error", json!({ "opcode": "crc32c", "type": "corrupt", "interval": 2 }));
    assert_eq!([0; 4].map(|_| channel.crc32c(b"123456789") == Ok(crc)), [true, false, true, false]);
    program.call("accel_error_inject_error", json!({ "opcode": "crc32c", "type": "disable" }));
    assert_eq!(channel.crc32c(b"123456789"), Ok(crc));
    let cores = program.call("accel_get_stats", json!({ "per_core": true }))["cores"].clone();
    assert_eq!(cores, json!([{ "core": 0, "operations": [counts("error", 8, 1)] }]));
    for (method, params, code) in [
        ("accel_assign_opc", json!({ "opname": "crc32", "module": "error" }), -32602),
        ("accel_assign_opc", json!({ "opname": "crc32c", "module": "ioat" }), -32602),
        ("accel_assign_opc", json!({ "opname": "compress", "module": "software" }), -32602),
        ("accel_error_inject_error", json!({ "opcode": "compress", "type": "failure" }), -22),
        ("accel_error_inject_error", json!({ "opcode": "x", "type": "failure" }), -32602),
        ("accel_error_inject_error", json!({ "opcode": "copy", "type": "x" }), -32602),
        (
            "accel_error_inject_error",
            json!({ "opcode": "copy", "type": "failure", "errcode": i64::from(i32::MIN) - 1 }),
            -32602,
        ),
    ] {
        assert_eq!(program.failure(method, params.clone()).0, code, "{method} {params}");
    }
    // The least error number has no positive one.
    program.call(
        "accel_error_inject_error",
        json!({ "opcode": "crc32c", "type": "failure", "count": 1, "errcode": i32::MIN }),
    );
    assert_eq!(channel.crc32c(b"a").unwrap_err(), crate::AccelFailure::Failed { errno: i32::MAX });
    let saved = json!({ "method": "accel_assign_opc", "params": { "opname": "crc32c", "module": "error" } });
    assert_eq!(program.saved("accel")[1..], [saved]);
}

#[test]
fn a_key_in_use_is_not_destroyed() {
    let program = Program::new("in-use");
    program.call("accel_crypto_key_create", by_value("k"));
    let (code, message) = program.failure("accel_crypto_key_create", by_value("k"));
    assert_eq!((code, message.as_str()), (-32602, "Invalid parameters: there is a key k"));
    let used = program.accel.keys().get("k").unwrap();
    let (code, message) = program.failure("accel_crypto_key_destroy", json!({ "key_name": "k" }));
    assert!(code == -16 && message.contains("k is in use 1 times"), "{message}");
    drop(used);
    program.call("accel_crypto_key_destroy", json!({ "key_name": "k" }));
    assert_eq!(program.failure("accel_crypto_key_destroy", json!({ "key_name": "k" })).0, -32602);
    assert_eq!(program.call("accel_crypto_keys_get", json!({})), json!([]));
}

#[test]
fn a_key_of_the_keyring_is_saved_by_its_name() {
    let program = Program::new("keyring");
    let file = program.secret_file("both", &format!("{KEY}{KEY2}\n"));
    let add = json!({ "name": "disk", "path": file });
    let create =
        json!({ "name": "k", "cipher": "AES_XTS", "keyring_key": "disk", "tweak_mode": "INCR_512_FULL_LBA" });
    assert_eq!(program.failure("accel_crypto_key_create", create.clone()).0, -126);
    program.call("keyring_file_add_key", add.clone());
    program.call("accel_crypto_key_create", create.clone());
    assert_eq!(program.call("accel_crypto_keys_get", json!({}))[0]["keyring_key"], "disk");
    let saved = program.saved("accel");
    assert_eq!(saved[1]["method"], "accel_crypto_key_create");
    assert_eq!(
        saved[1]["params"],
        json!({ "cipher": "AES_XTS", "keyring_key": "disk",
        "tweak_mode": "INCR_512_FULL_LBA", "name": "k" })
    );
    // Both at once, or neither, is no key.
    for params in [
        json!({ "name": "l", "cipher": "AES_XTS", "keyring_key": "disk", "key": KEY, "key2": KEY2 }),
        json!({ "name": "l", "cipher": "AES_XTS", "keyring_key": "disk", "key2": KEY2 }),
        json!({ "name": "l", "cipher": "AES_XTS", "key2": KEY2 }),
        json!({ "name": "l", "cipher": "AES_XTS", "keyring_key": "disk", "key_file": file }),
        json!({ "name": "l", "cipher": "AES_XTS" }),
        json!({ "name": "l", "cipher": "AES_XTS", "key": KEY }),
        json!({ "name": "", "cipher": "AES_XTS", "key": KEY, "key2": KEY2 }),
        json!({ "name": "l".repeat(256), "cipher": "AES_XTS", "key": KEY, "key2": KEY2 }),
        json!({ "name": "l", "cipher": "AES_CBC", "key": KEY }),
        json!({ "name": "l", "cipher": "ROT13", "key": KEY }),
    ] {
        let (code, message) = program.failure("accel_crypto_key_create", params);
        assert!(code == -32602 && !message.contains("0405060708"), "{message}");
    }

    // What is wrong with a secret is said of the parameter that names it.
    let odd = program.secret_file("odd", &format!("{KEY}{KEY2}0"));
    let equal = program.secret_file("equal", &format!("{KEY}{KEY}"));
    program.call("keyring_file_add_key", json!({ "name": "odd", "path": odd }));
    for (params, field) in [
        (json!({ "name": "l", "cipher": "AES_XTS", "key_file": odd }), "key_file: it has 65 digits"),
        (json!({ "name": "l", "cipher": "AES_XTS", "key_file": equal }), "key_file: key2: it is equal"),
        (json!({ "name": "l", "cipher": "AES_XTS", "key_file": "relative" }), "key_file: relative: "),
        (json!({ "name": "l", "cipher": "AES_XTS", "keyring_key": "odd" }), "keyring_key: it has 65 digits"),
    ] {
        let (_, message) = program.failure("accel_crypto_key_create", params);
        assert!(message.contains(field), "{message}");
    }
    program.call("keyring_file_remove_key", json!({ "name": "odd" }));

    let config = program.plane.save();
    let second = Program::within(program.directory.join("second"));
    ConfigFile::parse("s", config.to_string().as_bytes(), second.plane.catalog())
        .unwrap()
        .apply(&second.plane)
        .unwrap();
    assert_eq!(second.plane.save(), config);
    let same = second.accel.keys().get("k").unwrap().is_same(&program.accel.keys().get("k").unwrap());
    assert!(same);
}

#[test]
fn a_key_with_another_check_value_is_refused_with_its_file() {
    let program = Program::new("check-value");
    let (file, other) = (program.secret_file("k", &format!("{KEY}{KEY2}\n")), format!("{KEY2}{KEY}"));
    let other = program.secret_file("other", &other);
    let create = |file: &std::path::Path, value: &str| json!({ "name": "k", "cipher": "AES_XTS", "key_file": file, "check_value": value });
    let value = "00d5581adc4f00ee";
    let (code, message) = program.failure("accel_crypto_key_create", create(&other, value));
    let named = format!("key_file: {} has the key with the check value ", other.display());
    assert!(code == -32602 && message.contains(&named) && message.contains(value), "{message}");
    for invalid in ["", "0123", &format!("0x{}", &value[2..]), KEY] {
        let (code, message) = program.failure("accel_crypto_key_create", create(&file, invalid));
        assert!(code == -32602 && message.contains("check_value: it has 16"), "{message}");
        assert!(!message.contains("0405060708"), "{message}");
    }
    assert_eq!(program.call("accel_crypto_keys_get", json!({})), json!([]));
    program.call("accel_crypto_key_create", create(&file, &value.to_uppercase()));
    assert_eq!(program.saved("accel")[1]["params"]["check_value"], value);
    let given = |value: &str| {
        program.config(json!([{ "subsystem": "accel", "config":
            [{ "method": "accel_crypto_key_create", "params": create(&file, value) }] }]))
    };
    let saved = program.plane.save();
    let saved = ConfigFile::parse("s", saved.to_string().as_bytes(), program.plane.catalog()).unwrap();
    let (_, lines) = given(&value.to_uppercase()).reload(&saved, &program.plane);
    assert_eq!(lines, ["nothing has changed"]);
    // Without it the key is not compared, and has none when it is created again.
    program.call("accel_crypto_key_destroy", json!({ "key_name": "k" }));
    program.call("accel_crypto_key_create", json!({ "name": "k", "cipher": "AES_XTS", "key_file": other }));
    assert_eq!(program.saved("accel")[1]["params"]["check_value"], Value::Null);
}

#[test]
fn a_key_by_value_is_stored_in_the_folder_and_comes_back_with_the_saved_configuration() {
    let program = Program::new("folder");
    let folder = program.directory.join("keys");
    program.keyring.set_folder(&folder).unwrap();
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    program.call("accel_crypto_key_create", by_value("../k"));
    let file = folder.join("accel_crypto_key...%2fk.key");
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{KEY}{KEY2}"));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let config = program.plane.save();
    assert!(!config.to_string().contains(KEY) && !config.to_string().contains(KEY2), "{config}");
    assert!(config.to_string().contains(file.to_str().unwrap()), "{config}");

    // A program that starts from what was saved, and one that starts from the call by value.
    for config in [
        config.clone(),
        json!({ "subsystems": [{ "subsystem": "accel", "config":
            [{ "method": "accel_crypto_key_create", "params": by_value("../k") }] }] }),
    ] {
        let second = Program::within(program.directory.join("second"));
        second.keyring.set_folder(&folder).unwrap();
        let file = ConfigFile::parse("s", config.to_string().as_bytes(), second.plane.catalog()).unwrap();
        file.apply(&second.plane).unwrap();
        assert_eq!(second.plane.save(), program.plane.save());
    }
    // The call by value and the saved one are the same.
    let given = program.config(json!([{ "subsystem": "accel", "config":
        [{ "method": "accel_crypto_key_create", "params": by_value("../k") }] }]));
    let saved = ConfigFile::parse("s", config.to_string().as_bytes(), program.plane.catalog()).unwrap();
    let (_, lines) = given.reload(&saved, &program.plane);
    assert_eq!(lines, ["nothing has changed"]);

    // Another secret of this name is not written over the file.
    let third = Program::within(program.directory.join("third"));
    third.keyring.set_folder(&folder).unwrap();
    let other = json!({ "cipher": "AES_XTS", "key": KEY2, "key2": KEY, "name": "../k" });
    let (code, message) = third.failure("accel_crypto_key_create", other);
    assert!(code == -17 && message.contains("has another secret"), "{message}");
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{KEY}{KEY2}"));

    program.call("accel_crypto_key_destroy", json!({ "key_name": "../k" }));
    assert!(!file.exists());
    assert_eq!(program.saved("accel").len(), 1);
}

#[test]
fn a_key_by_value_without_a_folder_is_not_saved() {
    let program = Program::new("no-folder");
    program.call("accel_crypto_key_create", by_value("k"));
    let config = program.plane.save();
    assert!(!config.to_string().contains(KEY) && !config.to_string().contains("crypto_key"), "{config}");
    assert_eq!(program.saved("accel").len(), 1);
}

#[test]
fn a_folder_that_others_may_write_to_is_refused() {
    let program = Program::new("bad-folder");
    let folder = program.directory.join("keys");
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = |path: &std::path::Path| program.keyring.set_folder(path).unwrap_err().to_string();
    assert!(refused(&folder).contains("chmod 700"));
    assert!(refused(std::path::Path::new("keys")).contains("not absolute"));
    assert!(refused(&program.secret_file("file", "x")).contains("not a folder"));
    assert!(refused(&program.directory.join("a/b")).contains("No such file"));
    program.call("accel_crypto_key_create", by_value("k"));
    assert_eq!(program.saved("accel").len(), 1);
}

#[test]
fn the_engine_ioat_is_enabled_by_a_scan_and_saved_before_the_assignments_that_need_it() {
    let program = Program::new("ioat");
    let engines = |program: &Program| {
        let engines = program.call("accel_get_module_info", json!({}));
        let name = |engine: &Value| engine["module"].as_str().unwrap().to_string();
        engines.as_array().unwrap().iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(engines(&program), ["software", "error"]);
    let assign = json!({ "opname": "copy", "module": "ioat" });
    let (code, message) = program.failure("accel_assign_opc", assign.clone());
    assert_eq!(code, RpcError::INVALID_PARAMS);
    assert!(message.contains("enabled by ioat_scan_accel_module"), "{message}");
    for (addresses, code, reason) in [
        (json!(["/run/ioat0"]), RpcError::INVALID_PARAMS, "neither a PCI address"),
        (json!([]), RpcError::INVALID_PARAMS, "there is none"),
        (json!(["vfio-user:/nowhere/ioat0"]), RpcError::ENODEV, "No such file"),
        (json!(["0000:ff:1f.7"]), RpcError::ENODEV, "0000:ff:1f.7"),
    ] {
        let failure = program.failure("ioat_scan_accel_module", json!({ "addresses": addresses }));
        assert!(failure.0 == code && failure.1.contains(reason), "{addresses}: {failure:?}");
    }
    assert_eq!(engines(&program), ["software", "error"], "a scan that fails enables nothing");

    program.call("accel_assign_opc", json!({ "opname": "fill", "module": "software" }));
    let socket = program.directory.join("ioat0");
    let server = ioat_model::IoatServer::bind(&socket, ioat_model::IoatModel::new()).unwrap();
    let stop = server.stop_handle();
    let thread = std::thread::spawn(move || server.run().unwrap());
    let address = format!("vfio-user:{}", socket.display());
    // Twice the same, and again: it is opened once.
    for _ in 0..2 {
        program.call("ioat_scan_accel_module", json!({ "addresses": [address, address] }));
    }
    assert_eq!(engines(&program), ["software", "error", "ioat"]);
    assert_eq!(program.failure("accel_assign_opc", json!({ "opname": "xor", "module": "ioat" })).0, -32602);
    program.call("accel_assign_opc", assign);
    let assigned = program.call("accel_get_opc_assignments", json!({}));
    assert_eq!((&assigned["copy"], &assigned["fill"]), (&json!("ioat"), &json!("software")));
    let channel = json!({
        "address": address, "state": "free", "executed": 0, "num_bytes": 0, "failed": 0, "resets": 0
    });
    assert_eq!(program.call("ioat_get_channels", json!({})), json!([channel]));
    let saved = program.saved("accel");
    assert_eq!(
        saved[1..],
        [
            json!({ "method": "ioat_scan_accel_module", "params": { "addresses": [address] } }),
            json!({ "method": "accel_assign_opc", "params": { "opname": "copy", "module": "ioat" } }),
            json!({ "method": "accel_assign_opc", "params": { "opname": "fill", "module": "software" } }),
        ]
    );
    // No core has taken it: the CPU executes, and counts.
    program.accel.channel(0).copy(&mut [0; 16], &[1; 16]).unwrap();
    let stats = program.call("accel_get_stats", json!({}));
    let copies =
        json!([{ "opcode": "copy", "module_name": "ioat", "executed": 1, "failed": 0, "num_bytes": 16 }]);
    assert_eq!(stats["operations"], copies);
    drop(program);
    stop.stop();
    thread.join().unwrap();
}
