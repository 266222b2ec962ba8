//! What users see of the transports' declarations: the reference, and errors about parameters.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::Arc;

use bdev::Registry;
use bdev::rpc::BdevModule;
use control::ControlPlane;
use control::json::{Value, json};
use nvmf::rpc::NvmfModule;

struct TestPlane {
    _reactors: reactor::Reactors,
    plane: Arc<ControlPlane>,
}

impl TestPlane {
    fn new() -> TestPlane {
        let reactors = reactor::Reactors::start(&reactor::ReactorConfig::default()).unwrap();
        let builder = ControlPlane::builder(Vec::new());
        let bdevs = BdevModule::new(Registry::new(), builder.examiner());
        let target = NvmfModule::new(bdevs.registry().clone(), reactors.handles(), Default::default());
        let plane = builder.module(&target).module(&bdevs).start(None).unwrap();
        TestPlane { _reactors: reactors, plane }
    }

    fn create_error(&self, params: Value) -> String {
        self.plane.invoke("nvmf_create_transport", params).unwrap_err().message
    }
}

/// The sections of the target's methods.
fn sections(reference: &str) -> Vec<&str> {
    reference.split("\n## ").filter(|section| section.contains("; module `nvmf`")).collect()
}

#[test]
fn the_reference_has_the_parameters_of_every_transport() {
    let generated = control::reference::markdown(TestPlane::new().plane.catalog());
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/RPC.md");
    let committed = std::fs::read_to_string(committed).unwrap();
    let (generated, committed) = (sections(&generated), sections(&committed));
    assert!(generated.len() > 20, "{}", generated.len());
    for (one, other) in generated.iter().zip(&committed) {
        assert_eq!(one, other);
    }
    assert_eq!(generated.len(), committed.len());
}

#[test]
fn errors_name_transports_and_parameters_of_all_of_them() {
    let plane = TestPlane::new();
    assert_eq!(
        plane.create_error(json!({ "trtype": "FC", "max_io_size": 8192 })),
        "Invalid parameters: transport FC is not supported; expected TCP, RDMA or VFIOUSER"
    );
    let unknown = plane.create_error(json!({ "trtype": "TCP", "max_io": 8192 }));
    let names = "max_io: unknown parameter; expected trtype, tgt_name, max_queue_depth, \
                 max_io_qpairs_per_ctrlr, in_capsule_data_size, max_io_size, max_aq_depth, c2h_success, \
                 max_srq_depth, acceptor_backlog, no_wr_batching, no_srq, disable_mappable_bar0, \
                 max_connections, ";
    assert!(unknown.contains(names), "{unknown}");
    // An option of another transport has no effect, but a type.
    let wrong = plane.create_error(json!({ "trtype": "VFIOUSER", "max_connections": "many" }));
    assert!(wrong.contains("max_connections: "), "{wrong}");
    let mask = plane.create_error(json!({ "trtype": "TCP", "masked_oncs": ["nvmcmps", "format"] }));
    assert!(mask.contains("masked_oncs[1]: expected one of nvmcmps, "), "{mask}");
    assert!(plane.create_error(json!({})).contains("trtype: required, but missing"));
}

/// What publishes nothing any more, as its listeners were removed, is saved and loaded again.
#[test]
fn a_target_without_listeners_is_published_with_those_that_come() {
    let plane = TestPlane::new();
    let publish = |plane: &TestPlane| plane.plane.invoke("nvmf_publish_mdns_prr", json!({}));
    assert_eq!(publish(&plane).unwrap(), json!(true));
    let saved = plane.plane.save_subsystem("nvmf").unwrap();
    assert!(saved.iter().any(|call| call["method"] == "nvmf_publish_mdns_prr"), "{saved:?}");
    let loaded = TestPlane::new();
    assert_eq!(publish(&loaded).unwrap(), json!(true));
    assert!(publish(&loaded).unwrap_err().message.contains("is published already"));
}

/// What is created is reported and saved in the order of the list, whatever the order of creation.
#[test]
fn transports_are_reported_with_their_own_options_only() {
    let plane = TestPlane::new();
    for params in [
        json!({ "trtype": "vfiouser", "disable_mappable_bar0": true, "in_capsule_data_size": 4096 }),
        json!({ "trtype": "tcp", "max_connections": 100, "host_bytes_max": 1 << 20 }),
    ] {
        plane.plane.invoke("nvmf_create_transport", params).unwrap();
    }
    let saved = plane.plane.invoke("framework_get_config", json!({ "name": "nvmf" })).unwrap();
    let expected = json!([
        { "method": "nvmf_create_transport", "params": {
            "trtype": "TCP", "max_queue_depth": 128, "max_io_qpairs_per_ctrlr": 127,
            "in_capsule_data_size": 8192, "max_io_size": 131_072, "max_aq_depth": 128, "c2h_success": true,
            "max_connections": 100, "max_pending_logins": 512, "max_pending_logins_per_peer": 256,
            "connection_bytes_max": 16 << 20, "host_bytes_max": 1 << 20, "transfer_timeout_ms": 10_000,
            "dif_insert_or_strip": false, "masked_oncs": [], "masked_fuses": [] } },
        { "method": "nvmf_create_transport", "params": {
            "trtype": "VFIOUSER", "max_queue_depth": 256, "max_io_qpairs_per_ctrlr": 127,
            "max_io_size": 131_072, "disable_mappable_bar0": true, "dif_insert_or_strip": false,
            "masked_oncs": [], "masked_fuses": [] } },
    ]);
    assert_eq!(saved, expected);
    let exists = plane.create_error(json!({ "trtype": "TCP" }));
    assert_eq!(exists, "transport TCP exists");
}
