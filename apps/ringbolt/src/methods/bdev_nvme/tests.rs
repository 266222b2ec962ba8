use serde_json::json;

use crate::methods::tests::app;
use crate::rpc::RpcError;

#[test]
fn errors_have_spdks_codes() {
    let app = app();
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    let tcp = |more: serde_json::Value| {
        let mut params =
            json!({ "name": "N", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1", "subnqn": nqn });
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let with = |mut params: serde_json::Value, more: serde_json::Value| {
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let inject = |more| with(json!({ "name": "N", "cmd_type": "io", "opc": 2 }), more);
    let cmdbuf = format!("Bg{}==", "A".repeat(84));
    let command = |more| {
        let params = json!({ "name": "N", "cmd_type": "admin", "data_direction": "c2h", "cmdbuf": cmdbuf });
        with(params, more)
    };
    let attach = "bdev_nvme_attach_controller";
    let cases = [
        (attach, json!({ "name": "N", "trtype": "TCP" }), RpcError::INVALID_PARAMS),
        (attach, tcp(json!({ "color": "red" })), RpcError::INVALID_PARAMS),
        (attach, tcp(json!({ "psk": "key" })), RpcError::INVALID_PARAMS),
        (attach, tcp(json!({ "trtype": "RDMA" })), RpcError::EINVAL),
        (attach, tcp(json!({ "trsvcid": "0" })), RpcError::EINVAL),
        (attach, tcp(json!({ "subnqn": "x" })), RpcError::EINVAL),
        (attach, tcp(json!({ "adrfam": "ib" })), RpcError::EINVAL),
        (attach, tcp(json!({ "num_io_queues": 0 })), RpcError::EINVAL),
        (attach, tcp(json!({ "max_bdevs": 0 })), RpcError::EINVAL),
        (attach, tcp(json!({ "ctrlr_loss_timeout_sec": 5 })), RpcError::EINVAL),
        (attach, tcp(json!({ "multipath_opts": { "min_io": 1 } })), RpcError::INVALID_PARAMS),
        (attach, json!({ "name": "N", "trtype": "PCIe", "traddr": "zz" }), RpcError::EINVAL),
        // Well said, but there is no reactor in this test.
        (attach, tcp(json!({ "hdgst": true, "multipath": "failover" })), RpcError::INTERNAL),
        ("bdev_nvme_detach_controller", json!({ "name": "N" }), RpcError::ENODEV),
        ("bdev_nvme_reset_controller", json!({ "name": "N" }), RpcError::ENODEV),
        ("bdev_nvme_disable_controller", json!({ "name": "N", "cntlid": 1 }), RpcError::ENODEV),
        ("bdev_nvme_enable_controller", json!({ "name": "N" }), RpcError::ENODEV),
        ("bdev_nvme_enable_controller", json!({}), RpcError::INVALID_PARAMS),
        ("bdev_nvme_get_transport_statistics", json!({ "name": "N" }), RpcError::INVALID_PARAMS),
        ("bdev_nvme_add_error_injection", inject(json!({})), RpcError::ENODEV),
        ("bdev_nvme_add_error_injection", inject(json!({ "sct": 8 })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_add_error_injection", inject(json!({ "opc": 256 })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_add_error_injection", inject(json!({ "cmd_type": "fabrics" })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_remove_error_injection", inject(json!({})), RpcError::ENODEV),
        ("bdev_nvme_send_cmd", command(json!({})), RpcError::INVALID_PARAMS),
        ("bdev_nvme_send_cmd", command(json!({ "cmdbuf": "AAAA" })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_send_cmd", command(json!({ "cmdbuf": "a+/b" })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_send_cmd", command(json!({ "data": "AAAA", "data_len": 4 })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_send_cmd", command(json!({ "data_len": 1u64 << 31 })), RpcError::INVALID_PARAMS),
        ("bdev_nvme_apply_firmware", json!({ "filename": "/nowhere", "bdev_name": "N" }), RpcError::INTERNAL),
        ("bdev_nvme_get_controllers", json!({ "name": "N" }), RpcError::EINVAL),
        ("bdev_nvme_get_controller_health_info", json!({ "name": "N" }), RpcError::ENODEV),
        ("bdev_nvme_set_preferred_path", json!({ "name": "N", "cntlid": 1 }), RpcError::ENODEV),
        ("bdev_nvme_set_multipath_policy", json!({ "name": "N", "policy": "any" }), RpcError::INVALID_PARAMS),
        (
            "bdev_nvme_set_multipath_policy",
            json!({ "name": "N", "policy": "active_active" }),
            RpcError::ENODEV,
        ),
        ("bdev_nvme_get_path_iostat", json!({ "name": "Nvme0n1" }), -1),
        ("bdev_nvme_stop_discovery", json!({ "name": "N" }), RpcError::ENODEV),
        ("bdev_nvme_set_options", json!({ "reconnect_delay_sec": 1 }), RpcError::EINVAL),
        ("bdev_nvme_set_options", json!({ "action_on_timeout": "panic" }), RpcError::INVALID_PARAMS),
    ];
    for (method, params, expected) in cases {
        let error = app.invoke(method, params.clone()).expect_err(method);
        assert_eq!(error.code, expected, "{method} {params}: {error}");
    }
    assert_eq!(app.invoke("bdev_nvme_get_controllers", json!({})).unwrap(), json!([]));
}

#[test]
fn options_are_saved_as_they_were_set() {
    let app = app();
    let options = json!({ "bdev_retry_count": 5, "io_path_stat": true, "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 2,
        "multipath_opts": { "policy": "active_active", "selector": "round_robin", "min_io": 4 } });
    app.invoke("bdev_nvme_set_options", options).unwrap();
    let saved = &crate::config::save(&app)["subsystems"][0]["config"][0];
    assert_eq!(saved["method"], "bdev_nvme_set_options");
    assert_eq!(
        (&saved["params"]["bdev_retry_count"], &saved["params"]["ctrlr_loss_timeout_sec"]),
        (&json!(5), &json!(-1))
    );
    assert_eq!(saved["params"]["multipath_opts"]["min_io"], 4);
    let error = app.invoke("bdev_nvme_get_path_iostat", json!({ "name": "N" })).unwrap_err();
    assert_eq!((saved["params"]["io_path_stat"].as_bool(), error.code), (Some(true), RpcError::ENODEV));
    app.invoke("bdev_nvme_set_options", saved["params"].clone()).unwrap();
}
