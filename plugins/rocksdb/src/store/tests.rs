use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::*;
use crate::rig;

/// A file with the bdev `Disk`, which is removed at the end.
struct Image(PathBuf);

impl Image {
    fn new(test: &str, bytes: u64) -> Image {
        let path = std::env::temp_dir().join(format!("ringbolt-{test}-{}.img", std::process::id()));
        File::create(&path).unwrap().set_len(bytes).unwrap();
        Image(path)
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.0).unwrap()
    }

    fn open(&self, block_bytes: u32, options: &str) -> Result<Store, FileError> {
        let path = self.0.display();
        let params = format!(r#"{{"name":"Disk","filename":"{path}","block_size":{block_bytes}}}"#);
        let call = format!(r#"{{"method":"bdev_aio_create","params":{params}}}"#);
        let name = self.0.file_stem().unwrap().to_str().unwrap();
        rig::open(&rig::bdevs(name, &[call]), "Disk", options)
    }

    /// Why the store is not opened, also with `create=1`.
    fn refusal(&self, block_bytes: u32) -> (ErrorKind, String) {
        let [first, second] = ["", "&create=1"].map(|options| match self.open(block_bytes, options) {
            Err(error) => (error.kind, error.text),
            Ok(_) => panic!("it is opened"),
        });
        assert_eq!(first, second);
        first
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

#[test]
fn create_overwrites_nothing_that_begins_late_or_is_at_the_end() {
    const BYTES: u64 = 32 << 20;
    for (at, magic) in [((64 << 10) + 64, b"_BHRfS_M"), (BYTES - 512, b"EFI PART")] {
        let image = Image::new("store-foreign", BYTES);
        image.file().write_all_at(magic, at).unwrap();
        let (kind, text) = image.refusal(4096);
        let expected =
            format!("there is something else on it, from byte {at} on, `ringbolt blobfs format --force`");
        assert!(kind == ErrorKind::Corruption && text.contains(&expected), "{text}");
        let mut left = [0; 8];
        image.file().read_exact_at(&mut left, at).unwrap();
        assert_eq!(&left, magic);
    }
    let image = Image::new("store-blank", BYTES);
    let error = image.open(4096, "").err().unwrap();
    assert!(
        error.kind == ErrorKind::Invalid && error.text.contains("Disk is empty: create=1"),
        "{}",
        error.text
    );
    assert!(image.open(4096, "&create=1").is_ok());
    assert!(image.open(4096, "").is_ok());
}

#[test]
fn a_device_with_a_store_is_never_said_to_be_free_to_be_formatted() {
    let image = Image::new("store-damaged", 32 << 20);
    image.open(4096, "&create=1").unwrap().close();
    let check = |(kind, text): (ErrorKind, String), expected: ErrorKind, part: &str| {
        assert!(kind == expected && text.contains(part), "{kind:?}: {text}");
        assert!(!text.contains("format") && !text.contains("something else"), "{text}");
    };
    check(image.refusal(8192), ErrorKind::Invalid, "Disk: its blocks have 8192 bytes");
    image.file().set_len(30 << 20).unwrap();
    check(
        image.refusal(4096),
        ErrorKind::Corruption,
        "its device only 31457280; a part of the device is missing",
    );
    image.file().set_len(32 << 20).unwrap();
    image.open(4096, "").unwrap().close();
    // A super block of which neither the CRC nor a part is right.
    image.file().write_all_at(&[0xff; 4000], 64).unwrap();
    check(image.refusal(4096), ErrorKind::Corruption, "a blobstore was there: `ringbolt blob check`");
}

#[test]
fn a_device_that_cannot_be_read_is_an_io_error() {
    let error = |method: &str, params: &str| format!(r#"{{"method":"{method}","params":{{{params}}}}}"#);
    let failing = rig::bdevs(
        "store-unreadable",
        &[
            rig::ram_disk(32, 4096),
            error("bdev_error_create", r#""base_name":"M""#),
            error(
                "bdev_error_inject_error",
                r#""name":"EE_M","io_type":"read","error_type":"failure","num":100"#,
            ),
        ],
    );
    for options in ["", "&create=1"] {
        let error = rig::open(&failing, "EE_M", options).err().unwrap();
        assert_eq!((error.kind, &error.text[..]), (ErrorKind::Io, "EE_M: 4096 bytes at 0 cannot be read"));
    }
}
