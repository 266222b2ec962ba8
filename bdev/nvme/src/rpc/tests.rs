use std::sync::Arc;

use bdev::rpc::BdevModule;
use control::ControlPlane;

use super::*;

fn app() -> Arc<ControlPlane> {
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
    let controllers = NvmeModule::new(&bdevs, &[], Default::default());
    builder.module(&bdevs).module(&controllers).start(None).unwrap()
}

#[test]
fn errors_have_spdks_codes() {
    let app = app();
    let nqn = "nqn.2016-06.io.spdk:cnode1";
    let tcp = |more: Value| {
        let mut params =
            json!({ "name": "N", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1", "subnqn": nqn });
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let with = |mut params: Value, more: Value| {
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
        (attach, tcp(json!({ "psk": "key" })), -126),
        (attach, tcp(json!({ "trtype": "FC" })), RpcError::EINVAL),
        (attach, tcp(json!({ "trsvcid": "0" })), RpcError::EINVAL),
        (attach, tcp(json!({ "subnqn": "x" })), RpcError::EINVAL),
        (attach, tcp(json!({ "adrfam": "ib" })), RpcError::EINVAL),
        (attach, tcp(json!({ "num_io_queues": 0 })), RpcError::EINVAL),
        (attach, tcp(json!({ "max_bdevs": 0 })), RpcError::EINVAL),
        (attach, tcp(json!({ "ctrlr_loss_timeout_sec": 5 })), RpcError::EINVAL),
        (attach, tcp(json!({ "multipath_opts": { "min_io": 1 } })), RpcError::INVALID_PARAMS),
        (attach, json!({ "name": "N", "trtype": "PCIe", "traddr": "zz" }), RpcError::EINVAL),
        (
            attach,
            json!({ "name": "N", "trtype": "PCIe", "traddr": "0:0.0", "hostaddr": "::1" }),
            RpcError::EINVAL,
        ),
        (attach, json!({ "name": "N", "trtype": "TCP", "traddr": "::1", "hostaddr": "x" }), RpcError::EINVAL),
        (attach, json!({ "name": "N", "trtype": "TCP", "traddr": "::1", "hostsvcid": 9 }), RpcError::EINVAL),
        (attach, tcp(json!({ "priority": "high" })), RpcError::EINVAL),
        (attach, tcp(json!({ "priority": "65536" })), RpcError::EINVAL),
        (
            attach,
            json!({ "name": "N", "trtype": "PCIe", "traddr": "0:0.0", "priority": "3" }),
            RpcError::EINVAL,
        ),
        // Valid, but this test has no reactor.
        (attach, tcp(json!({ "priority": "6" })), RpcError::INTERNAL),
        (attach, tcp(json!({ "hdgst": true, "multipath": "failover" })), RpcError::INTERNAL),
        (attach, tcp(json!({ "prchk_reftag": true, "prchk_guard": true })), RpcError::INTERNAL),
        ("bdev_nvme_set_hotplug", json!({}), RpcError::INVALID_PARAMS),
        ("bdev_nvme_set_hotplug", json!({ "enable": true, "period_us": -1 }), RpcError::INVALID_PARAMS),
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
fn options_are_saved_with_their_set_values() {
    let app = app();
    let options = json!({ "bdev_retry_count": 5, "io_path_stat": true, "ctrlr_loss_timeout_sec": -1, "reconnect_delay_sec": 2,
        "multipath_opts": { "policy": "active_active", "selector": "round_robin", "min_io": 4 } });
    app.invoke("bdev_nvme_set_options", options).unwrap();
    let saved = &app.save()["subsystems"][0]["config"][0];
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

/// `transport_ack_timeout` as SPDK has it: a power of two of milliseconds, with five bits.
#[test]
fn the_ack_timeout_is_a_power_of_two_of_milliseconds() {
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
    let controllers = NvmeModule::new(&bdevs, &[], Default::default());
    let app = builder.module(&bdevs).module(&controllers).start(None).unwrap();
    let timeout_ms = || controllers.options().driver_options().ack_timeout_ms;
    assert_eq!(timeout_ms(), 0);
    for (log2, ms, saved) in
        [(1, 2, 1), (14, 16_384, 14), (31, i32::MAX as u32, 31), (200, i32::MAX as u32, 31), (0, 0, 0)]
    {
        app.invoke("bdev_nvme_set_options", json!({ "transport_ack_timeout": log2 })).unwrap();
        let config = app.save();
        let recorded = &config["subsystems"][0]["config"][0]["params"]["transport_ack_timeout"];
        assert_eq!((timeout_ms(), recorded), (ms, &json!(saved)), "{log2}");
    }
    let error = app.invoke("bdev_nvme_set_options", json!({ "transport_ack_timeout": 256 })).unwrap_err();
    assert_eq!(error.code, RpcError::INVALID_PARAMS);
}

/// Attached and detached in other words for the same address.
#[test]
fn an_ipv6_address_is_taken_in_brackets_and_in_any_spelling() {
    let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
    let controllers = NvmeModule::new(&bdevs, reactors.handles(), Default::default());
    let app = builder.module(&bdevs).module(&controllers).start(None).unwrap();
    // Nothing listens there; a machine may have no IPv6.
    let attach = |traddr: &str| {
        let params = json!({ "name": "N", "trtype": "TCP", "traddr": traddr, "trsvcid": "1", "adrfam": "ipv6",
            "subnqn": "nqn.2016-06.io.spdk:cnode1" });
        app.invoke("bdev_nvme_attach_controller", params).unwrap_err()
    };
    for traddr in ["[::1]", "::1", "[0:0::1]"] {
        let error = attach(traddr);
        assert_eq!(error.code, RpcError::EIO, "{error}");
        assert!(error.to_string().contains("[::1]:1"), "{error}");
    }
    for traddr in ["[::1", "[]", "[127.0.0.1]"] {
        assert_eq!(attach(traddr).code, RpcError::EINVAL, "{traddr}");
    }
    app.drain();
    drop(reactors);
    app.stop();
}

#[test]
fn attaching_to_a_silent_peer_keeps_nothing_waiting_and_is_cancelled() {
    let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
    let controllers = NvmeModule::new(&bdevs, reactors.handles(), Default::default());
    let app = builder.module(&bdevs).module(&controllers).start(None).unwrap();
    // The kernel accepts connections, and no process answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let attach = json!({ "name": "N", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": port,
        "subnqn": "nqn.2016-06.io.spdk:cnode1", "fabrics_connect_timeout_us": 600_000_000, "background": true });
    let job = app.invoke("bdev_nvme_attach_controller", attach).unwrap()["job"].clone();
    let state = || app.invoke("job_get", json!({ "job": job })).unwrap()[0].clone();
    // An update runs beside it.
    app.invoke("bdev_null_create", json!({ "name": "M", "num_blocks": 8, "block_size": 512 })).unwrap();
    let attached = || app.invoke("bdev_nvme_get_controllers", Value::Null).unwrap();
    while attached() == json!([]) {
        assert_eq!(state()["state"], "running");
        std::thread::yield_now();
    }
    assert_eq!(
        (state()["state"].as_str(), state()["method"].as_str()),
        (Some("running"), Some("bdev_nvme_attach_controller"))
    );
    app.invoke("job_cancel", json!({ "job": job })).unwrap();
    while state()["state"] == "running" {
        std::thread::yield_now();
    }
    assert_eq!((&state()["state"], attached()), (&json!("cancelled"), json!([])));
    assert_eq!(app.save()["subsystems"][0]["config"].as_array().map(Vec::len), Some(1), "only the null bdev");
    app.drain();
    drop(reactors);
    app.stop();
}

#[test]
fn hotplug_is_saved_after_the_controllers() {
    let builder = ControlPlane::builder(Vec::new());
    let bdevs = BdevModule::new(bdev::Registry::new(), builder.examiner());
    let controllers = NvmeModule::new(&bdevs, &[], Default::default());
    let app = builder.module(&bdevs).module(&controllers).start(None).unwrap();
    let saved = || app.save()["subsystems"][0]["config"].as_array().unwrap().clone();
    for (asked, period_us) in [(0, 100_000), (7, 7), (u64::MAX, 10_000_000)] {
        let params = json!({ "enable": false, "period_us": asked });
        assert_eq!(app.invoke("bdev_nvme_set_hotplug", params).unwrap(), true);
        let expected = json!({ "enable": false, "period_us": period_us });
        assert_eq!(saved(), [json!({ "method": "bdev_nvme_set_hotplug", "params": expected })]);
    }
    app.invoke("bdev_nvme_set_options", json!({ "timeout_us": 5 })).unwrap();
    assert_eq!(saved()[0]["method"], "bdev_nvme_set_hotplug");
    // As after each attachment by name: at a start, hot plug must not attach it under another name first.
    controllers.record_hotplug();
    assert_eq!(saved()[1]["method"], "bdev_nvme_set_hotplug");
}
