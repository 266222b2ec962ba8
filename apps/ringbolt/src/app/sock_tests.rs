//! Tests of the options of sockets.

use bdev::Registry;

use control::RpcError;
use control::json::{Value, json};

use super::{App, OPTIONS_OF_PROCESS, StartOptions};

#[test]
fn socket_options_are_those_of_the_kernels_sockets() {
    let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
    let ask = |name: &str| app.control.invoke("sock_impl_get_options", json!({ "impl_name": name }));
    let options = ask("posix").unwrap();
    assert!(options["recv_buf_size"].as_u64().unwrap() > 4096, "{options}");
    assert_eq!(options["enable_ktls"], false);
    assert_eq!(ask("ssl").unwrap_err().code, RpcError::INVALID_PARAMS);
}

#[test]
fn zero_copy_is_set_by_side_reported_and_saved() {
    let _turn = sync::lock(&OPTIONS_OF_PROCESS);
    let app = App::start(Registry::new(), Vec::new(), StartOptions::default()).unwrap();
    let set = |params: Value| app.control.invoke("sock_impl_set_options", params).unwrap();
    let state = || {
        let options = app.control.invoke("sock_impl_get_options", json!({ "impl_name": "posix" })).unwrap();
        let config = app.control.invoke("framework_get_config", json!({ "name": "sock" })).unwrap();
        let [server, client] = ["enable_zerocopy_send_server", "enable_zerocopy_send_client"]
            .map(|name| options[name].as_bool().unwrap());
        (server, client, config)
    };
    assert_eq!((state().0, state().1), (false, false));
    // SPDK's default of an implementation that is not there.
    set(json!({ "impl_name": "ssl", "enable_zerocopy_send_server": true }));
    assert_eq!((state().0, state().1), (false, false));
    set(json!({ "impl_name": "posix", "enable_zerocopy_send_server": true }));
    let (server, client, saved) = state();
    assert_eq!((server, client), (true, false));
    set(json!({ "impl_name": "posix", "enable_zerocopy_send_client": true }));
    assert_eq!((state().0, state().1), (true, true));
    // The saved call restores what it was saved with.
    app.control.invoke("sock_impl_set_options", saved[1]["params"].clone()).unwrap();
    assert_eq!(state(), (true, false, saved));
    set(json!({ "impl_name": "posix", "enable_zerocopy_send_server": false }));
    assert_eq!((state().0, state().1), (false, false));
}
