//! Namespace management and attachment, on the simulated controller.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../examples/exercise.rs"]
mod exercise;
mod rig;

use block_io::{Request, Status, Tag};
use dma::Data;
use nvme::testing::SimulatedConfig;
use nvme::{AdminError, Controller, Namespace};
use rig::{attach, buffer, finish, on_device, options, status};
use wire_nvme::NSID_ALL;
use wire_nvme::admin::Identify;
use wire_nvme::identify::{Cns, ControllerList, Csi, IdentifyController, NamespaceList};
use wire_nvme::manage::NewNamespace;

/// Blocks of namespace 1, and of the unallocated capacity.
const BLOCKS: u64 = 1024;

fn sized(blocks: u64) -> NewNamespace {
    NewNamespace { nsze: blocks, ncap: blocks, ..NewNamespace::default() }
}

async fn list(controller: &Controller, cns: Cns, nsid: u32) -> Vec<u32> {
    let page =
        controller.identify(&Identify { cns: cns.to_wire(), ..Default::default() }, nsid).await.unwrap();
    let page = page.first_chunk().unwrap();
    match cns {
        Cns::Controllers | Cns::NamespaceControllers => {
            ControllerList::decode(page).unwrap().0.into_iter().map(u32::from).collect()
        }
        _ => NamespaceList::decode(page).unwrap().0,
    }
}

async fn unallocated(controller: &Controller) -> u128 {
    let view = Identify { cns: Cns::Controller.to_wire(), ..Default::default() };
    let page = controller.identify(&view, 0).await.unwrap();
    IdentifyController::decode(page.first_chunk().unwrap()).unwrap().unvmcap
}

/// Status code type and status code of a failed command.
fn refused<T: std::fmt::Debug>(answer: Result<T, AdminError>) -> (u8, u8) {
    match answer {
        Err(AdminError::Status(status)) => (status.status_code_type(), status.status_code()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_namespace_is_created_attached_used_detached_and_deleted() {
    on_device(SimulatedConfig::new(BLOCKS, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        let cntlid = controller.identity().cntlid;
        let bytes = u128::from(BLOCKS) * 512;
        assert_eq!(unallocated(&controller).await, bytes);
        let nsid = controller.create_namespace(&sized(256), Csi::Nvm).await.unwrap();
        assert_eq!((nsid, unallocated(&controller).await), (2, bytes - 256 * 512));
        // It is allocated, but not attached.
        assert_eq!(list(&controller, Cns::AllocatedNamespaces, 0).await, [1, 2]);
        assert_eq!(list(&controller, Cns::AllocatedNamespaces, 1).await, [2]);
        assert!(list(&controller, Cns::NamespaceControllers, 2).await.is_empty());
        assert_eq!(controller.active_namespaces().await.unwrap(), [1]);
        assert!(Namespace::of(&controller, &core, nsid, &options()).await.is_err());

        controller.attach_namespace(nsid, &[cntlid], true).await.unwrap();
        assert_eq!(controller.active_namespaces().await.unwrap(), [1, 2]);
        assert_eq!(list(&controller, Cns::NamespaceControllers, 2).await, [u32::from(cntlid)]);
        let mut namespace = Namespace::of(&controller, &core, nsid, &options()).await.unwrap();
        assert_eq!((namespace.blocks(), namespace.block_size()), (256, 512));
        let write = Request::write(Tag(0), 255, 1, buffer(&core, 512, 0x5a));
        assert_eq!(status(&core, &mut namespace, write).await, Status::SUCCESS);
        let read = Request::read(Tag(0), 255, 1, buffer(&core, 512, 0));
        let done = finish(&core, &mut namespace, vec![read]).await;
        assert!(
            done[0]
                .request()
                .data()
                .and_then(Data::single)
                .unwrap()
                .as_slice()
                .iter()
                .all(|byte| *byte == 0x5a)
        );
        assert!(device.namespace_data(1).iter().all(|byte| *byte == 0), "the other namespace is not touched");

        // A detached namespace keeps its data, but is not accessible.
        controller.attach_namespace(nsid, &[cntlid], false).await.unwrap();
        assert_eq!(controller.active_namespaces().await.unwrap(), [1]);
        let read = Request::read(Tag(0), 255, 1, buffer(&core, 512, 0));
        let gone = status(&core, &mut namespace, read).await;
        assert!(!gone.is_success(), "{gone}");
        drop(namespace);
        controller.attach_namespace(nsid, &[cntlid], true).await.unwrap();
        assert_eq!(device.namespace_data(2)[255 * 512], 0x5a);

        // Deleting an attached namespace removes it from every list and frees its capacity.
        controller.delete_namespace(nsid).await.unwrap();
        assert_eq!(list(&controller, Cns::AllocatedNamespaces, 0).await, [1]);
        assert_eq!(controller.active_namespaces().await.unwrap(), [1]);
        assert_eq!(unallocated(&controller).await, bytes);
        assert_eq!(controller.create_namespace(&sized(BLOCKS), Csi::Nvm).await.unwrap(), 2);
        controller.delete_namespace(NSID_ALL).await.unwrap();
        assert!(list(&controller, Cns::AllocatedNamespaces, 0).await.is_empty());
        assert_eq!(unallocated(&controller).await, 2 * bytes);
    });
}

#[test]
fn invalid_namespace_management_commands_fail_with_the_specified_status() {
    on_device(SimulatedConfig::new(BLOCKS, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        let cntlid = controller.identity().cntlid;
        let create = async |new: NewNamespace, csi| refused(controller.create_namespace(&new, csi).await);
        // Insufficient capacity, an unknown format, thin provisioning, no blocks, another command set.
        assert_eq!(create(sized(BLOCKS + 1), Csi::Nvm).await, (1, 0x15));
        assert_eq!(create(sized(u64::MAX), Csi::Nvm).await, (1, 0x15));
        assert_eq!(create(NewNamespace { format: 1, ..sized(8) }, Csi::Nvm).await, (1, 0x0a));
        assert_eq!(create(NewNamespace { ncap: 4, ..sized(8) }, Csi::Nvm).await, (1, 0x1b));
        assert_eq!(create(sized(0), Csi::Nvm).await, (0, 0x02));
        assert_eq!(create(sized(8), Csi::Zoned).await, (1, 0x29));
        // All identifiers in use.
        for nsid in 2..=4 {
            assert_eq!(controller.create_namespace(&sized(8), Csi::Nvm).await.unwrap(), nsid);
        }
        assert_eq!(create(sized(8), Csi::Nvm).await, (1, 0x16));
        let attachment = async |nsid, controllers: &[u16], attach| {
            refused(controller.attach_namespace(nsid, controllers, attach).await)
        };
        assert_eq!(attachment(1, &[cntlid], true).await, (1, 0x18), "already attached");
        assert_eq!(attachment(2, &[cntlid], false).await, (1, 0x1a), "not attached");
        assert_eq!(attachment(2, &[cntlid + 1], true).await, (1, 0x1c), "no such controller");
        assert_eq!(attachment(2, &[cntlid, cntlid], true).await, (1, 0x1c), "twice the same");
        for nsid in [0, 5, NSID_ALL] {
            assert_eq!(attachment(nsid, &[cntlid], true).await, (0, 0x0b), "namespace {nsid:#x}");
        }
        assert_eq!(refused(controller.delete_namespace(5).await), (0, 0x0b));
        // The failed commands have changed nothing.
        assert_eq!(controller.active_namespaces().await.unwrap(), [1]);
        assert_eq!(unallocated(&controller).await, u128::from(BLOCKS - 24) * 512);
    });
}

#[test]
fn every_command_of_the_simulated_controller_passes_the_exercise() {
    on_device(SimulatedConfig::new(4096, 512), async |core, device| {
        let controller = attach(&core, &device).await;
        exercise::exercise_attached(core.clone(), controller, 1)
            .await
            .map_err(|error| error.to_string())
            .unwrap();
        assert!(device.executed() > 10);
    });
}
