//! Bdevs and stores for tests.

use std::sync::Arc;

use plugin_bdevs::ConfiguredBdevs;
use rocksdb_abi::FileError;

use crate::store::Store;
use crate::uri::StoreUri;

/// The bdevs that calls make, as JSON and one after another. `test` names a file.
pub(crate) fn bdevs(test: &str, calls: &[String]) -> Arc<ConfiguredBdevs> {
    let path = std::env::temp_dir().join(format!("ringbolt-{test}-{}.json", std::process::id()));
    let config = format!(r#"{{"subsystems":[{{"subsystem":"bdev","config":[{}]}}]}}"#, calls.join(","));
    std::fs::write(&path, config).unwrap();
    let configured = ConfiguredBdevs::start(&path);
    std::fs::remove_file(&path).unwrap();
    Arc::new(configured.unwrap())
}

/// The call that makes the RAM disk `M`.
pub(crate) fn ram_disk(mib: u64, block_bytes: u64) -> String {
    let blocks = (mib << 20) / block_bytes;
    let params = format!(r#"{{"name":"M","num_blocks":{blocks},"block_size":{block_bytes}}}"#);
    format!(r#"{{"method":"bdev_malloc_create","params":{params}}}"#)
}

/// Opens the store of a bdev, or makes it with `options` of the URI.
pub(crate) fn open(configured: &Arc<ConfiguredBdevs>, bdev: &str, options: &str) -> Result<Store, FileError> {
    let uri = StoreUri::parse(&format!("ringbolt://x.json?bdev={bdev}{options}")).unwrap();
    Store::open(configured.clone(), &uri)
}
