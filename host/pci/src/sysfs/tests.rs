use super::*;
use std::os::unix::fs::symlink;

/// A fake system in a temporary directory, which is removed on drop.
pub(crate) struct FakeSysfs {
    pub(crate) root: PathBuf,
}

impl FakeSysfs {
    pub(crate) fn new(name: &str) -> FakeSysfs {
        let root = std::env::temp_dir().join(format!("ringbolt-pci-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        std::fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
        FakeSysfs { root }
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
        let directory = format!("sys/bus/pci/devices/{address}");
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
            self.file(&format!("{directory}/{name}"), text);
        }
        if let Some(driver) = driver {
            self.link(&format!("{directory}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
        }
    }
}

impl Drop for FakeSysfs {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

#[test]
fn functions_are_listed_in_order_with_their_attributes() {
    let machine = FakeSysfs::new("list");
    machine.function("0000:00:04.0", "0x010802\n", Some("nvme"));
    machine.function("0000:00:03.0", "0x020000\n", None);
    machine.link("sys/bus/pci/devices/0000:00:04.0/iommu_group", "../../../kernel/iommu_groups/7");
    machine.file("sys/bus/pci/devices/0000:00:04.0/numa_node", "1\n");
    machine.file("sys/bus/pci/devices/not-an-address/vendor", "0x1\n");
    let found = enumerate(&machine.sysfs()).unwrap();
    assert_eq!(found.iter().map(|info| info.address).collect::<Vec<_>>(), [at("00:03.0"), at("00:04.0")]);
    assert_eq!(
        found[1],
        PciFunctionInfo {
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
fn a_system_without_pci_has_no_functions() {
    assert_eq!(enumerate(&Sysfs::new("/nonexistent")).unwrap(), []);
    assert!(matches!(function_info(&Sysfs::new("/nonexistent"), at("00:03.0")), Err(PciError::NotFound(_))));
}

#[test]
fn invalid_contents_are_reported_with_their_file() {
    let machine = FakeSysfs::new("lie");
    machine.function("0000:00:04.0", "class\n", None);
    let error = enumerate(&machine.sysfs()).unwrap_err().to_string();
    assert!(error.contains("0000:00:04.0/class contains 'class', which is not a class code"), "{error}");
    machine.file("sys/bus/pci/devices/0000:00:04.0/resource", "0x1 0x2\n");
    assert!(matches!(bars(&machine.sysfs(), at("00:04.0")), Err(PciError::Content { .. })));
}

#[test]
fn bars_without_an_address_are_omitted() {
    let machine = FakeSysfs::new("bars");
    machine.function("0000:00:04.0", "0x010802\n", None);
    let memory = |index, bytes| PciBar { index, kind: BarKind::Memory, bytes };
    assert_eq!(
        bars(&machine.sysfs(), at("00:04.0")).unwrap(),
        [memory(0, 16384), PciBar { index: 2, kind: BarKind::Ports, bytes: 32 }, memory(3, 256)]
    );
    let huge = "0x0000000000000001 0xffffffffffffffff 0x200";
    assert_eq!(bar(0, huge), Some(Some(memory(0, u64::MAX))));
    assert_eq!(bar(0, "0x5 0x1 0x200"), Some(None));
}

#[test]
fn configuration_space_is_read_of_functions_for_user_space() {
    let machine = FakeSysfs::new("config");
    machine.function("0000:00:04.0", "0x010802\n", Some("vfio-pci"));
    machine.function("0000:00:05.0", "0x010802\n", Some("nvme"));
    machine.file("sys/bus/pci/devices/0000:00:04.0/config", &"x".repeat(5000));
    let found = enumerate(&machine.sysfs()).unwrap();
    assert_eq!(found.iter().map(is_for_user_space).collect::<Vec<_>>(), [true, false]);
    assert_eq!(config_space(&machine.sysfs(), at("00:04.0")).unwrap(), [b'x'; 4096]);
    assert!(matches!(config_space(&machine.sysfs(), at("00:05.0")), Err(PciError::File { .. })));
    assert!(matches!(config_space(&machine.sysfs(), at("00:06.0")), Err(PciError::NotFound(_))));
}
