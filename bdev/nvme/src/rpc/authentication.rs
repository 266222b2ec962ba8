//! Keys with which hosts and controllers authenticate.

use control::{Method, RpcError};
use nvme_auth::{AuthKey, AuthKeys};

use super::module::{NO_CONTROLLER, NvmeModule, path_key};

/// The system's error for a key that is not there, which SPDK has too.
const NO_KEY: i64 = -126;

pub(super) fn methods() -> Vec<Method<NvmeModule>> {
    vec![
        Method::concluded_update("bdev_nvme_set_keys", set_keys, authenticate)
            .text(
                "Replaces the keys of a controller, of all its paths. What is connected authenticates anew \
                 with them: admin queues before the method returns, then I/O queues between their commands, \
                 or with the next one if they are idle. A path that is not accepted is lost, and connects \
                 anew. Without keys what is connected stays so.",
                "true",
            )
            .errors(&[
                NO_CONTROLLER,
                (NO_KEY, "there is no such key, or it was removed"),
                (RpcError::EINVAL, "it is no key"),
                (RpcError::EIO, "the controller does not accept the keys, which are set nevertheless"),
                (RpcError::ETIMEDOUT, "the controller does not answer"),
            ]),
    ]
}

impl NvmeModule {
    /// Reads keys of the keyring; an empty name is none.
    pub(super) fn keys(
        &self,
        host: Option<&str>,
        controller: Option<&str>,
    ) -> Result<Option<AuthKeys>, RpcError> {
        let read = |name: &str| {
            let key = AuthKey::of_secret(&self.keyring.get(name)?);
            key.map_err(|error| RpcError::new(RpcError::EINVAL, format!("{name}: {error}")))
        };
        let named = |name: Option<&'_ str>| name.filter(|name| !name.is_empty()).map(str::to_string);
        match (named(host), named(controller)) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(RpcError::invalid_params("dhchap_ctrlr_key needs a dhchap_key")),
            (Some(host), controller) => {
                let controller = controller.map(|name| read(&name)).transpose()?;
                Ok(Some(AuthKeys { host: read(&host)?, controller }))
            }
        }
    }
}

control::parameters! {
    struct SetKeys {
        /// Controller
        name: String,
        /// Key of the keyring with which the host authenticates
        dhchap_key: Option<String>,
        /// Key of the keyring with which the controller has to authenticate; needs `dhchap_key`
        dhchap_ctrlr_key: Option<String>,
    }
}

/// Returns the name of the controller.
fn set_keys(module: &NvmeModule, params: SetKeys) -> Result<String, RpcError> {
    let keys = module.keys(params.dhchap_key.as_deref(), params.dhchap_ctrlr_key.as_deref())?;
    let controllers = module.initiator.controllers();
    let controller = controllers.iter().find(|controller| controller.name == params.name);
    let controller = controller
        .ok_or_else(|| RpcError::new(RpcError::ENODEV, format!("there is no controller {}", params.name)))?;
    let credentials = |options: &nvme::Options| options.authentication.clone();
    let paths = controller.paths.iter().map(|path| (path, credentials(&path.config.options)));
    let paths: Vec<_> = paths.filter_map(|(path, credentials)| Some((path, credentials?))).collect();
    if paths.is_empty() {
        let message = format!("{}: only controllers over fabrics authenticate", params.name);
        return Err(RpcError::new(RpcError::EINVAL, message));
    }
    for (path, credentials) in paths {
        credentials.set_keys(keys.clone());
        let key = path_key(&params.name, &path.config.id);
        for (name, value) in
            [("dhchap_key", &params.dhchap_key), ("dhchap_ctrlr_key", &params.dhchap_ctrlr_key)]
        {
            // An empty name is none.
            module.saved.paths.set_parameter(&key, name, value.clone().unwrap_or_default());
        }
    }
    Ok(params.name)
}

fn authenticate(module: &NvmeModule, name: String) -> Result<bool, RpcError> {
    module.initiator.authenticate(&name)?;
    Ok(true)
}
