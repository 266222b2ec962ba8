//! SPDK's methods about sockets. There is one implementation: the kernel's.

use crate::{DecodeLog, Method, Module, NoParameters, Parameter, ParameterError, Parameters, RpcError};
use serde_json::{Map, Value, json};
use sockets::{ZERO_COPY_SEND, ZeroCopySwitch};

/// The options of this process's sockets.
pub struct SocketModule {
    switch: &'static ZeroCopySwitch,
}

impl SocketModule {
    /// Of this process.
    pub fn new() -> SocketModule {
        SocketModule { switch: &ZERO_COPY_SEND }
    }
}

impl Default for SocketModule {
    fn default() -> Self {
        SocketModule::new()
    }
}

impl Module for SocketModule {
    const NAME: &'static str = "sock";

    const IS_SUBSYSTEM: bool = true;

    fn methods() -> Vec<Method<SocketModule>> {
        vec![
            Method::query("sock_impl_get_options", socket_options)
                .at_any_stage()
                .text(
                    "Describes the sockets. The kernel sizes their buffers; the sizes are its limits.",
                    "SPDK's options",
                ),
            Method::query("sock_get_default_impl", |_: &SocketModule, _: NoParameters| {
                Ok::<_, RpcError>(json!({ "impl_name": "posix" }))
            })
            .at_any_stage()
            .text("Names the implementation of sockets: the kernel's.", "`impl_name`"),
            Method::update("sock_impl_set_options", set_socket_options)
                .at_any_stage()
                .assigns(&["enable_zerocopy_send_server", "enable_zerocopy_send_client"])
                .text(
                    "Sets whether connections of NVMe/TCP that begin from now on send without a copy, if at least 32 KiB \
                     are to be sent. It is off by default, because the kernel copies over loopback anyway, and then it \
                     takes longer; a connection turns it off after eight copies in a row.",
                    "true",
                ),
        ]
    }

    fn save(&self) -> Vec<Value> {
        let [server, client] = [true, false].map(|accepted| self.switch.is_on(accepted));
        let options = json!({
            "impl_name": "posix",
            "enable_zerocopy_send_server": server,
            "enable_zerocopy_send_client": client,
        });
        // SPDK's defaults are saved too, as SPDK does.
        vec![
            json!({ "method": "sock_set_default_impl", "params": { "impl_name": "posix" } }),
            json!({ "method": "sock_impl_set_options", "params": options }),
        ]
    }
}

crate::parameters! {
    struct SocketImplementationName {
        /// posix or uring: the kernel's sockets
        impl_name: String,
    }
}

fn socket_options(module: &SocketModule, params: SocketImplementationName) -> Result<Value, RpcError> {
    if !["posix", "uring"].contains(&params.impl_name.as_str()) {
        return Err(RpcError::invalid_params(format!("impl_name: {:?} is not there", params.impl_name)));
    }
    Ok(json!({
        "recv_buf_size": buffer_bytes_max("tcp_rmem"),
        "send_buf_size": buffer_bytes_max("tcp_wmem"),
        "enable_recv_pipe": false,
        "enable_quickack": false,
        "enable_placement_id": 0,
        "enable_zerocopy_send_server": module.switch.is_on(true),
        "enable_zerocopy_send_client": module.switch.is_on(false),
        "zerocopy_threshold": 0,
        "tls_version": 0,
        "enable_ktls": false,
    }))
}

/// The size to which the kernel lets a socket's buffer grow; 0 if it does not say.
fn buffer_bytes_max(name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).unwrap_or_default();
    text.split_ascii_whitespace().nth(2).and_then(|word| word.parse().ok()).unwrap_or(0)
}

crate::parameters! {
    struct SocketOptions {
        /// Send large data of accepted connections without a copy, with `posix`; by default as it is
        enable_zerocopy_send_server: Option<bool>,
        /// The same for connections that this process opens
        enable_zerocopy_send_client: Option<bool>,
        /// The implementation: `posix` is the kernel's sockets; the others are accepted without effect
        impl_name: String = "posix".to_string(),
    }
    only("the kernel decides about it") { enable_quickack: bool = false, enable_placement_id: u32 = 0 }
    only("what is sent without a copy has 32 KiB or more") { zerocopy_threshold: u32 = 0 }
    only("OpenSSL encrypts in user space: kernel TLS needs a module, and saves a copy, not the cipher") {
        enable_ktls: bool = false,
    }
    only("TLS is 1.3, with keys of the connection's hosts and listeners") {
        tls_version: u32 = 0,
        psk_key: String = String::new(),
        psk_identity: String = String::new(),
    }
    one_of("data is received into place, or through one buffer for each connection or reactor") {
        enable_recv_pipe: bool = [false, true],
    }
    // What is so here, and SPDK's default.
    one_of("the kernel sizes buffers") {
        recv_buf_size: u32 = [BUFFER_BYTES, TLS_BUFFER_BYTES],
        send_buf_size: u32 = [BUFFER_BYTES, TLS_BUFFER_BYTES],
    }
}

/// SPDK's default size of a socket's buffers. The kernel sizes ours.
const BUFFER_BYTES: u32 = 2 << 20;
/// The default of its implementation with TLS.
const TLS_BUFFER_BYTES: u32 = 4096;

/// [`SocketOptions`] with the default sizes of their implementation.
struct CheckedSocketOptions(SocketOptions);

impl Parameters for CheckedSocketOptions {
    fn declaration() -> Vec<Parameter> {
        SocketOptions::declaration()
    }

    fn from_object(
        object: Map<String, Value>,
        log: &mut DecodeLog,
    ) -> Result<CheckedSocketOptions, ParameterError> {
        let text = |name: &str| object.get(name).and_then(Value::as_str);
        let (name, default) = match text("impl_name") {
            Some("ssl") => ("ssl", TLS_BUFFER_BYTES),
            name => (name.unwrap_or("posix"), BUFFER_BYTES),
        };
        for size in ["recv_buf_size", "send_buf_size"] {
            let value = object.get(size).filter(|value| !value.is_null() && **value != default);
            if let Some(value) = value {
                return Err(ParameterError::new(format!(
                    "{size}: {value} is not supported with {name}; leave it out or set it to {default}"
                )));
            }
        }
        SocketOptions::from_object(object, log).map(CheckedSocketOptions)
    }

    fn to_object(&self) -> Map<String, Value> {
        self.0.to_object()
    }
}

fn set_socket_options(module: &SocketModule, params: CheckedSocketOptions) -> Result<bool, RpcError> {
    let SocketOptions { enable_zerocopy_send_server, enable_zerocopy_send_client, impl_name, .. } = params.0;
    if !["posix", "uring", "ssl"].contains(&impl_name.as_str()) {
        return Err(RpcError::invalid_params(format!("impl_name: {impl_name:?} is not there")));
    }
    if impl_name == "posix" {
        for (accepted, enabled) in [(true, enable_zerocopy_send_server), (false, enable_zerocopy_send_client)]
        {
            if let Some(enabled) = enabled {
                module.switch.set(accepted, enabled);
            }
        }
    }
    Ok(true)
}
