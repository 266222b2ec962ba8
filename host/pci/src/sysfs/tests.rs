use super::*;
use std::os::unix::fs::symlink;

/// A made-up machine in a folder, which goes when the value does.
pub(crate) struct Machine {
    pub(crate) root: PathBuf,
}

impl Machine {
    pub(crate) fn new(name: &str) -> Machine {
        let root = std::env::temp_dir().join(format!("ringbolt-pci-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
        Machine { root }
    }

    pub(crate) fn sysfs(&self) -> Sysfs {
        Sysfs::new(&self.root)
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub(crate) fn link(&self, path: &str, to: &str) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(to, path).unwrap();
    }

    pub(crate) fn function(&self, address: &str, class: &str, driver: Option<&str>) {
        let folder = format!("sys/bus/pci/devices/{address}");
        for (name, text) in [
            ("vendor", "0x1b36\n"),
            ("device", "0x0010\n"),
            ("class", class),
            ("revision", "0x02\n"),
            ("numa_node", "-1\n"),
            (
                "resource",
                "0x00000000febd0000 0x00000000febd3fff 0x0000000000140204\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                 0x000000000000c000 0x000000000000c01f 0x0000000000040101\n\
                 0x00000000febd5000 0x00000000febd50ff 0x0000000000040200\n\
                 0x0000000000000000 0x0000000000000fff 0x0000000000040200\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
            ),
        ] {
            self.file(&format!("{folder}/{name}"), text);
        }
        if let Some(driver) = driver {
            self.link(&format!("{folder}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn at(text: &str) -> Address {
    text.parse().unwrap()
}

#[test]
fn functions_are_listed_in_order_with_what_is_known_of_them() {
    let machine = Machine::new("list");
    machine.function("0000:00:04.0", "0x010802\n", Some("nvme"));
    machine.function("0000:00:03.0", "0x020000\n", None);
    machine.link("sys/bus/pci/devices/0000:00:04.0/iommu_group", "../../../kernel/iommu_groups/7");
    machine.file("sys/bus/pci/devices/0000:00:04.0/numa_node", "1\n");
    machine.file("sys/bus/pci/devices/not-an-address/vendor", "0x1\n");
    let found = enumerate(&machine.sysfs()).unwrap();
    assert_eq!(found.iter().map(|info| info.address).collect::<Vec<_>>(), [at("00:03.0"), at("00:04.0")]);
    assert_eq!(
        found[1],
        Info {
            address: at("00:04.0"),
            vendor: 0x1b36,
            device: 0x10,
            class: NVME_CLASS,
            revision: 2,
            driver: Some("nvme".to_string()),
            iommu_group: Some(7),
            numa_node: Some(1),
        }
    );
    assert!(found[1].is_nvme() && !found[0].is_nvme());
    assert_eq!((found[0].numa_node, found[0].iommu_group, &found[0].driver), (None, None, &None));
}

#[test]
fn a_machine_without_pci_has_no_functions() {
    assert_eq!(enumerate(&Sysfs::new("/nonexistent")).unwrap(), []);
    assert!(matches!(info(&Sysfs::new("/nonexistent"), at("00:03.0")), Err(PciError::NotFound(_))));
}

#[test]
fn files_that_lie_are_named() {
    let machine = Machine::new("lie");
    machine.function("0000:00:04.0", "class\n", None);
    let error = enumerate(&machine.sysfs()).unwrap_err().to_string();
    assert!(error.contains("0000:00:04.0/class holds 'class', which is no class code"), "{error}");
    machine.file("sys/bus/pci/devices/0000:00:04.0/resource", "0x1 0x2\n");
    assert!(matches!(bars(&machine.sysfs(), at("00:04.0")), Err(PciError::Content { .. })));
}

#[test]
fn only_bars_with_an_address_count() {
    let machine = Machine::new("bars");
    machine.function("0000:00:04.0", "0x010802\n", None);
    let memory = |index, bytes| Bar { index, kind: BarKind::Memory, bytes };
    assert_eq!(
        bars(&machine.sysfs(), at("00:04.0")).unwrap(),
        [memory(0, 16384), Bar { index: 2, kind: BarKind::Ports, bytes: 32 }, memory(3, 256)]
    );
    let huge = "0x0000000000000001 0xffffffffffffffff 0x200";
    assert_eq!(bar(0, huge), Some(Some(memory(0, u64::MAX))));
    assert_eq!(bar(0, "0x5 0x1 0x200"), Some(None));
}
