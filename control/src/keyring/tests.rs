use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::{ConfigFile, ControlPlane};

/// A directory for a test, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("ringbolt-keyring-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn plane(keyring: &Keyring) -> Arc<ControlPlane> {
    let module = Arc::new(KeyringModule::new(keyring.clone()));
    ControlPlane::builder(Vec::new()).module(&module).start(None).unwrap()
}

fn key(name: &str, path: &Path, references: u32) -> Value {
    json!({ "name": name, "module": "keyring_file", "removed": false, "probed": false, "refcnt": references,
        "path": path })
}

fn removed(name: &str, references: u32) -> Value {
    json!({ "name": name, "module": "keyring_file", "removed": true, "probed": false, "refcnt": references })
}

#[test]
fn calls_that_fail_have_spdks_codes_and_change_nothing() {
    let directory = Directory::new("refused");
    let (keyring, good) = (Keyring::default(), directory.file("good", "swordfish"));
    let plane = plane(&keyring);
    let open = directory.file("open", "swordfish");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o640)).unwrap();
    std::os::unix::fs::symlink(&open, directory.0.join("link")).unwrap();
    let large = directory.file("large", &"swordfish".repeat(KEY_BYTES_MAX));
    plane.invoke("keyring_file_add_key", json!({ "name": "key0", "path": good })).unwrap();
    let add = |name: &str, path: &Path| ("keyring_file_add_key", json!({ "name": name, "path": path }));
    let remove = |name: &str| ("keyring_file_remove_key", json!({ "name": name }));
    for ((method, params), code, message) in [
        (add("key1", Path::new("good")), -1, "good: the path of a key is absolute"),
        (add("key1", &open), -1, "others than its owner may use it, mode 640: chmod 600"),
        (add("key1", &directory.0), -1, "not a regular file, but a directory"),
        (add("key1", &directory.0.join("link")), -1, "others than its owner may use it, mode 640"),
        (add("key1", &directory.0.join("gone")), -2, "gone: No such file"),
        (add("key1", &large), -105, "it has more than 32767 bytes"),
        (add("key1", &directory.file("empty", "")), -1, "it is empty"),
        (add("key0", &good), -17, "there is a key key0"),
        (add(":key0", &good), -17, "there is a key :key0"),
        (add("other:key1", &good), -22, "there is only the global keyring"),
        (add("", &good), -22, "it is empty"),
        (add(":", &good), -22, "it is empty"),
        (add(&"k".repeat(256), &good), -22, "more than 255 bytes"),
        (add("a\0b", &good), -22, "a NUL"),
        (remove("key1"), -126, "no key is called key1"),
        (
            remove("DHHC-1:00:c2VjcmV0:"),
            -126,
            "no key is called what was given, which is a secret: give the name of a key of the keyring",
        ),
        (remove("other:key0"), -126, "no key is called other:key0"),
        (remove(""), -126, "no key is called "),
        (("keyring_file_add_key", json!({ "name": "key1" })), -32602, "path: required"),
    ] {
        let error = plane.invoke(method, params.clone()).unwrap_err();
        assert!(error.code == code && error.message.contains(message), "{method} {params}: {error:?}");
        assert!(!error.message.contains("fish"), "{error:?}");
    }
    assert_eq!(plane.invoke("keyring_get_keys", Value::Null), Ok(json!([key("key0", &good, 1)])));
}

#[test]
fn a_colon_before_a_name_makes_no_difference() {
    let directory = Directory::new("colon");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    keyring.add_file(":key0", &path).unwrap();
    assert_eq!(keyring.get("key0").unwrap(), Secret::new("swordfish"));
    assert_eq!(keyring.get(":key0").unwrap(), Secret::new("swordfish"));
    assert_eq!(keyring.describe(), [key(":key0", &path, 1)]);
    keyring.remove_file("key0").unwrap();
    assert!(matches!(keyring.get(":key0"), Err(KeyError::NotFound(_))));
}

#[test]
fn a_key_that_is_removed_in_use_is_listed_until_its_last_user_ends() {
    let directory = Directory::new("removal");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    keyring.add_file("key0", &path).unwrap();
    keyring.add_file("key1", &path).unwrap();
    let one = keyring.key("key0").unwrap();
    let two = one.clone();
    let secret = one.read().unwrap();
    assert_eq!(keyring.describe(), [key("key0", &path, 3), key("key1", &path, 1)]);

    keyring.remove_file("key0").unwrap();
    assert_eq!(keyring.describe(), [key("key1", &path, 1), removed("key0", 2)]);
    // It cannot be found or read; what was read stays.
    assert!(matches!(keyring.key("key0"), Err(KeyError::NotFound(_))));
    assert!(matches!(keyring.remove_file("key0"), Err(KeyError::NotFound(_))));
    let error = RpcError::from(one.read().unwrap_err());
    assert_eq!((error.code, error.message.as_str()), (-126, "the key key0 was removed"));
    assert_eq!(secret, Secret::new("swordfish"));

    // Its name is free. A reference is to the key, not to the name.
    let other = directory.file("b", "marlin");
    keyring.add_file("key0", &other).unwrap();
    assert_eq!(keyring.get("key0").unwrap(), Secret::new("marlin"));
    assert!(one.read().is_err());
    drop(one);
    assert_eq!(keyring.describe(), [key("key1", &path, 1), key("key0", &other, 1), removed("key0", 1)]);
    drop(two);
    assert_eq!(keyring.describe(), [key("key1", &path, 1), key("key0", &other, 1)]);
}

#[test]
fn a_key_is_read_again_whenever_it_is_needed() {
    let directory = Directory::new("again");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    keyring.add_file("key0", &path).unwrap();
    let key = keyring.key("key0").unwrap();
    directory.file("a", "marlin\n");
    assert_eq!(key.read().unwrap(), Secret::new("marlin\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(key.read().unwrap_err().to_string().ends_with("mode 644: chmod 600"));
    fs::remove_file(&path).unwrap();
    assert!(key.read().unwrap_err().to_string().contains("No such file"));
    directory.file("a", "tuna");
    assert_eq!(key.read().unwrap(), Secret::new("tuna"));
}

#[test]
fn a_saved_keyring_has_calls_and_no_secret_and_reloads_without_a_change() {
    let directory = Directory::new("saved");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    let add =
        |name: &str| json!({ "method": "keyring_file_add_key", "params": { "name": name, "path": path } });
    let config = |calls: Value| {
        let text = json!({ "subsystems": [{ "subsystem": "keyring", "config": calls }] }).to_string();
        ConfigFile::parse("test.json", text.as_bytes(), plane(&Keyring::default()).catalog()).unwrap()
    };
    let enable = json!({ "method": "keyring_linux_set_options", "params": { "enable": true } });
    let plane = plane(&keyring);
    let first = config(json!([add(":key0"), add("key1"), enable]));
    first.apply(&plane).unwrap();
    let in_use = keyring.key("key1").unwrap();

    let saved = plane.save();
    assert!(!saved.to_string().contains("fish"), "{saved}");
    assert_eq!(saved["subsystems"][0]["config"], json!([enable, add(":key0"), add("key1")]));
    // The same file, the same in another spelling, and what was saved.
    let saved_file = ConfigFile::parse("saved.json", saved.to_string().as_bytes(), plane.catalog()).unwrap();
    let spelled = config(json!([enable, add("key1"), add("key0")]));
    for new in [&first, &spelled, &saved_file] {
        let (_, lines) = first.reload(new, &plane);
        assert_eq!((lines, plane.save()), (vec!["nothing has changed".to_string()], saved.clone()));
    }
    // One more, and one less, which is in use.
    let (now, lines) = first.reload(&config(json!([enable, add("key0"), add("key2")])), &plane);
    let shown = path.display();
    assert_eq!(
        lines,
        [
            format!("removed: keyring_file_add_key name=key1 path={shown}"),
            format!("applied: keyring_file_add_key name=key2 path={shown}"),
        ]
    );
    assert_eq!(keyring.describe(), [key(":key0", &path, 1), key("key2", &path, 1), removed("key1", 1)]);
    assert_eq!(plane.save()["subsystems"][0]["config"], json!([enable, add(":key0"), add("key2")]));
    drop(in_use);
    assert_eq!(keyring.describe(), [key(":key0", &path, 1), key("key2", &path, 1)]);

    // What was saved makes the same keyring.
    let other = Keyring::default();
    let other_plane = self::plane(&other);
    saved_file.apply(&other_plane).unwrap();
    assert_eq!(other_plane.save(), saved);
    assert_eq!(now.reload(&now, &plane).1, ["nothing has changed"]);
}

#[test]
fn nothing_that_is_printed_has_a_secret() {
    let directory = Directory::new("printed");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    keyring.add_file("key0", &path).unwrap();
    let key = keyring.key("key0").unwrap();
    let secret = key.read().unwrap();
    directory.file("a", "");
    let printed = format!("{key:?} {secret:?} {secret} {:?} {:?}", key.read(), keyring.describe());
    assert!(!printed.contains("fish") && printed.contains("key0"), "{printed}");
}

#[test]
fn a_key_of_the_kernel_is_there_while_it_is_used() {
    let name = format!("ringbolt-control-key-{}", std::process::id());
    let Ok(kernel) = KernelKey::add(&name, b"swordfish") else {
        println!("skipped: there are no keyrings here");
        return;
    };
    let keyring = Keyring::default();
    let plane = plane(&keyring);
    assert!(matches!(keyring.get(&name), Err(KeyError::NotFound(_))), "it is not enabled");
    plane.invoke("keyring_linux_set_options", json!({ "enable": true })).unwrap();
    assert_eq!(keyring.get(&name).unwrap(), Secret::new("swordfish"));
    assert_eq!(keyring.get(&format!(":{name}")).unwrap(), Secret::new("swordfish"));
    assert_eq!(keyring.describe(), [Value::Null; 0]);

    let one = keyring.key(&name).unwrap();
    let two = keyring.key(&name).unwrap();
    let described = json!({ "name": name, "module": "linux", "removed": false, "probed": true, "refcnt": 3,
        "sn": kernel.serial() });
    assert_eq!(keyring.describe(), [described]);
    let error = plane.invoke("keyring_file_remove_key", json!({ "name": name })).unwrap_err();
    assert!(error.code == -22 && error.message.contains("the kernel's"), "{error}");
    assert_eq!(plane.save()["subsystems"][0]["config"].as_array().map(Vec::len), Some(1));
    // The kernel's key is gone: what has a reference reads nothing more.
    kernel.unlink().unwrap();
    drop(one);
    assert!(matches!(two.read(), Err(KeyError::Kernel { .. })), "{two:?}");
    drop(two);
    assert_eq!(keyring.describe(), [Value::Null; 0]);
    assert!(matches!(keyring.get(&name), Err(KeyError::NotFound(_))));
}

#[test]
fn a_configuration_is_not_saved_without_a_key_that_is_in_use() {
    let directory = Directory::new("save");
    let (keyring, path) = (Keyring::default(), directory.file("a", "swordfish"));
    let plane = plane(&keyring);
    let save = || plane.invoke("save_config", Value::Null);
    keyring.add_file("key0", &path).unwrap();
    let user = keyring.key("key0").unwrap();
    assert!(save().is_ok());
    keyring.remove_file("key0").unwrap();
    let error = save().unwrap_err();
    assert!(error.code == RpcError::EBUSY && error.message.contains("key0 was removed"), "{error:?}");
    // What uses it finds another key of this name in the file.
    keyring.add_file(":key0", &path).unwrap();
    assert!(save().is_ok());
    keyring.remove_file("key0").unwrap();
    assert!(save().is_err());
    drop(user);
    assert!(save().is_ok());
}
