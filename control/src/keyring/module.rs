//! SPDK's methods of the keyring.

use std::path::Path;

use serde_json::Value;

use super::{CheckedFile, Keyring, bare_name};
use crate::{Method, Module, NoParameters, RpcError};

const NO_KEY: i64 = -126;
const NO_BUFFER_SPACE: i64 = -105;

/// The keyring as a module.
pub struct KeyringModule {
    keyring: Keyring,
}

impl KeyringModule {
    /// Of this keyring, which other modules use too.
    pub fn new(keyring: Keyring) -> KeyringModule {
        KeyringModule { keyring }
    }
}

impl Module for KeyringModule {
    const NAME: &'static str = "keyring";

    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<KeyringModule>> {
        vec![
            Method::prepared_update("keyring_file_add_key", check_file, add_file)
                .canonical(|_, params: &mut AddFile| {
                    params.name = bare_name(&params.name)?.to_string();
                    Ok(())
                })
                .text(
                    "Adds a file as a key. It is read once to see that it can be, and again whenever its \
                     secret is needed: new contents are in force from then on. Group and others have no \
                     right on the file, and it belongs to the server's user or to root.",
                    "true",
                )
                .errors(&[
                    (RpcError::EPERM, "the path is relative, or the file is refused; the message says why"),
                    (-2, "there is no such file"),
                    (RpcError::EEXIST, "a key has this name"),
                    (RpcError::EINVAL, "no key can have this name"),
                    (RpcError::ENOSPC, "there are 65536 keys"),
                    (NO_BUFFER_SPACE, "the file has more than 32767 bytes"),
                ]),
            Method::update("keyring_file_remove_key", |module: &KeyringModule, params: RemoveFile| {
                module.keyring.remove_file(&params.name)?;
                Ok::<_, RpcError>(true)
            })
            .canonical(|_, params: &mut RemoveFile| {
                params.name = bare_name(&params.name)?.to_string();
                Ok(())
            })
            .text(
                "Removes a key; its file stays. What uses the key reads it no more, and the key is listed as \
                 removed until nothing does.",
                "true",
            )
            .errors(&[(NO_KEY, "no key has this name"), (RpcError::EINVAL, "the key is not a file")]),
            Method::query("keyring_get_keys", |module: &KeyringModule, _: NoParameters| {
                Ok::<_, RpcError>(module.keyring.describe())
            })
            .text(
                "Lists the keys, not their secrets: those that are removed and in use are last.",
                "array of keys with `name`, `module` (`keyring_file` or `linux`), `removed`, `probed`, \
                 `refcnt`, and `path` of a file or `sn`, the kernel's number, unless they are removed",
            ),
            Method::update("keyring_linux_set_options", |module: &KeyringModule, params: LinuxOptions| {
                module.keyring.set_kernel_keys(params.enable);
                Ok::<_, RpcError>(true)
            })
            .at_any_stage()
            .text(
                "Sets whether the name of a key that is not a file is looked for in the kernel's keyring: \
                 among the keys of the type `user` in the session keyring of this process. Unlike SPDK's it \
                 can be called at any time.",
                "true",
            ),
        ]
    }

    fn save(&self) -> Vec<Value> {
        self.keyring.calls()
    }

    fn not_loadable(&self) -> Option<String> {
        let name = self.keyring.removed_in_use()?;
        Some(format!(
            "the key {name} was removed and is in use: what uses it could not be created again from a file; \
             add the key again, or remove what uses it (keyring_get_keys lists the key until then)"
        ))
    }
}

crate::parameters! {
    struct AddFile {
        /// Name of the key; a colon before it makes no difference
        name: String,
        /// Absolute path of the file, which has at most 32767 bytes
        path: String,
    }
}

crate::parameters! {
    struct RemoveFile {
        /// Name of the key
        name: String,
    }
}

crate::parameters! {
    struct LinuxOptions {
        /// Whether the kernel's keyring is used
        enable: bool = false,
    }
}

fn check_file(module: &KeyringModule, params: AddFile) -> Result<CheckedFile, RpcError> {
    Ok(module.keyring.check_file(&params.name, Path::new(&params.path))?)
}

fn add_file(module: &KeyringModule, file: CheckedFile) -> Result<bool, RpcError> {
    module.keyring.add_checked(file)?;
    Ok(true)
}
