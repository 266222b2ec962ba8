//! The device that a job runs on: fio's `filename`, as a URI.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Access, BdevError, Descriptor, Registry, malloc, null, uring};
use device_model::{DeviceProfile, MediaState, disk};
use reactor::Core;
use store_client::{AttachOptions, Cluster, ClusterImage, EtcdOptions};

use crate::accel_device::AccelSource;
use crate::access_pattern::Geometry;
use crate::poller::DynChannel;
use crate::spec::JobSpec;
use crate::units::parse_bytes;

/// A device, as given by a URI or a bdev's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `null:SIZE[?bs=BYTES]`: a null bdev, which completes I/O at once and moves no data.
    Null {
        /// Size in bytes.
        bytes: u64,
        /// Bytes of a logical block.
        block_bytes: u32,
    },
    /// `malloc:SIZE[?bs=BYTES]`: a RAM disk.
    Malloc {
        /// Size in bytes.
        bytes: u64,
        /// Bytes of a logical block.
        block_bytes: u32,
    },
    /// `uring:PATH[?bs=BYTES]`: a file or block device through io_uring; `aio:PATH[?bs=BYTES]` is the same
    /// through Linux AIO.
    Uring {
        /// Path of the file or block device.
        path: String,
        /// Bytes of a logical block; 0 for the file's preferred size.
        block_bytes: u32,
        /// Whether Linux AIO carries its I/O.
        aio: bool,
    },
    /// `model:PROFILE[?size=BYTES&bs=BYTES&state=fresh|steady&seed=N&store=none|memory]`: a simulated device
    /// with modelled latencies.
    Model {
        /// Name of a built-in profile, or path of a profile file.
        profile: String,
        /// Size in bytes; `None` for the profile's.
        bytes: Option<u64>,
        /// Bytes of a logical block; `None` for the profile's.
        block_bytes: Option<u32>,
        /// Preconditioning of the simulated media.
        state: MediaState,
        /// Seed of the simulated latencies.
        seed: u64,
        /// Whether data is kept.
        store: disk::Store,
    },
    /// `nvme+tcp://HOST:PORT/SUBNQN?ns=N` and the NVMe driver's other transports.
    Nvme {
        /// URI of the namespace.
        uri: nvme::Uri,
    },
    /// `store:POOL/IMAGE[?cluster=DIR][&etcd=URLS]`, and `&etcd_user_file=PATH` and such: an image of a cluster of the store.
    Store {
        /// Pool of the image.
        pool: String,
        /// Name of the image.
        image: String,
        /// Directory of the cluster.
        cluster: String,
        /// What is not in files there.
        etcd: EtcdOptions,
    },
    /// `accel:OPERATION[?size=BYTES&block=BYTES&sources=N]`: an operation of the acceleration framework.
    Accel(AccelSource),
    /// A name without a scheme: a bdev of the configuration.
    Bdev {
        /// Name of the bdev.
        name: String,
    },
}

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// The text is not a valid device URI or name.
    #[error("--filename={text}: {reason}")]
    Syntax {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The device profile cannot be read or parsed.
    #[error("--filename=model:{profile}: {reason}")]
    Profile {
        /// Name or path of the profile.
        profile: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The block layer returned an error.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// The cluster of the store cannot be used.
    #[error("--filename=store:…: {0}")]
    Store(#[from] store_client::ClientError),
    /// The connection to the target failed.
    #[error("{uri}: {source}")]
    Fabric {
        /// The target.
        uri: Box<nvme::Uri>,
        /// Error of the NVMe driver.
        source: Box<nvme::NvmeOpenError>,
    },
}

/// A source whose device exists, so that channels can be opened.
#[derive(Clone, Debug)]
pub enum PreparedSource {
    /// A bdev in the registry.
    Bdev {
        /// Its name.
        name: String,
    },
    /// A namespace that the NVMe driver connects to.
    Nvme {
        /// URI of the namespace.
        uri: nvme::Uri,
    },
}

const BLOCK_BYTES_DEFAULT: u32 = 512;
/// Directory of a cluster of the store, unless it is named.
const CLUSTER_DEFAULT: &str = "ringbolt-store";

impl Source {
    /// Parses a device URI or a bdev's name.
    pub fn parse(text: &str) -> Result<Source, SourceError> {
        let syntax =
            |reason: &str| SourceError::Syntax { text: text.to_string(), reason: reason.to_string() };
        if text.starts_with("nvme+") {
            let uri = text.parse().map_err(|error: nvme::UriError| syntax(&error.to_string()))?;
            return Ok(Source::Nvme { uri });
        }
        let Some((scheme, rest)) = text.split_once(':') else {
            return match text {
                "" => Err(syntax("is empty; name a bdev, or null:1g, malloc:64m, uring:/path, nvme+tcp://…")),
                name => Ok(Source::Bdev { name: name.to_string() }),
            };
        };
        let (body, query) = rest.split_once('?').unwrap_or((rest, ""));
        if scheme == "model" {
            return parse_model(body, query).map_err(|reason| syntax(&reason));
        }
        if scheme == "accel" {
            return AccelSource::parse(body, query).map(Source::Accel).map_err(|reason| syntax(&reason));
        }
        if scheme == "store" {
            return parse_store(body, query).ok_or_else(|| {
                syntax("is not store:POOL/IMAGE, or store:POOL/IMAGE?cluster=DIR&etcd=URL[,URL]")
            });
        }
        let mut block_bytes = None;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let value = pair.strip_prefix("bs=").ok_or_else(|| syntax("the only option is ?bs=BYTES"))?;
            let bytes = parse_bytes(value).and_then(|bytes| u32::try_from(bytes).ok());
            block_bytes = Some(bytes.ok_or_else(|| syntax("bs is not a size; for example ?bs=4k"))?);
        }
        let size = || match parse_bytes(body) {
            Some(bytes) if bytes > 0 => Ok(bytes),
            _ => Err(syntax("is not a size; for example null:1g or malloc:64m?bs=4k")),
        };
        match scheme {
            "null" => {
                Ok(Source::Null { bytes: size()?, block_bytes: block_bytes.unwrap_or(BLOCK_BYTES_DEFAULT) })
            }
            "malloc" => {
                Ok(Source::Malloc { bytes: size()?, block_bytes: block_bytes.unwrap_or(BLOCK_BYTES_DEFAULT) })
            }
            "uring" | "aio" if body.is_empty() => {
                Err(syntax("names no file; for example uring:/tmp/disk.img"))
            }
            "uring" | "aio" => Ok(Source::Uring {
                path: body.to_string(),
                block_bytes: block_bytes.unwrap_or(0),
                aio: scheme == "aio",
            }),
            _ => Err(syntax(
                "is none of null:, malloc:, uring:, aio:, model:, store:, accel:, nvme+tcp:// or a bdev's name",
            )),
        }
    }

    /// Creates the device if the URI asks for one. A file or block device is opened for writing only if `writes`.
    ///
    /// # Errors
    /// The device cannot be created.
    pub fn prepare(&self, registry: &Registry, writes: bool) -> Result<PreparedSource, SourceError> {
        let name = match self {
            Source::Null { bytes, block_bytes } => {
                let blocks = bytes / u64::from((*block_bytes).max(1));
                let config = null::NullConfig::new(&unique_name("null"), blocks, *block_bytes);
                null::create(registry, config)?.name().to_string()
            }
            Source::Malloc { bytes, block_bytes } => {
                let blocks = bytes / u64::from((*block_bytes).max(1));
                let config = malloc::MallocConfig::new(&unique_name("malloc"), blocks, *block_bytes);
                malloc::create(registry, config)?.name().to_string()
            }
            Source::Uring { path, block_bytes, aio } => {
                create_uring(registry, path, *block_bytes, *aio, writes)?
            }
            Source::Model { .. } => self.create_model(registry)?,
            Source::Store { pool, image, cluster, etcd } => {
                create_store(registry, pool, image, cluster, etcd, writes)?
            }
            Source::Accel(source) => {
                let name = unique_name("accel");
                source.create(registry, &name)?;
                name
            }
            Source::Nvme { uri } => return Ok(PreparedSource::Nvme { uri: uri.clone() }),
            Source::Bdev { name } => name.clone(),
        };
        Ok(PreparedSource::Bdev { name })
    }
}

impl PreparedSource {
    /// Opens a channel on this core, for writing where the device allows it. A connection has this queue
    /// depth.
    ///
    /// # Errors
    /// The device cannot be opened or reached.
    pub async fn open(
        &self,
        core: &Core,
        registry: &Registry,
        queue_depth: u32,
    ) -> Result<(Geometry, Box<DynChannel>), SourceError> {
        match self {
            PreparedSource::Bdev { name } => {
                let opened = registry.open(name, Access::ReadWrite);
                let device =
                    opened.or_else(|error| registry.open(name, Access::ReadOnly).map_err(|_| error))?;
                open_device(core, &device)
            }
            PreparedSource::Nvme { uri } => {
                let options = nvme::Options { queue_depth, ..nvme::Options::default() };
                let connected = nvme::Namespace::open(core, uri, &options).await;
                let failed =
                    |source| SourceError::Fabric { uri: Box::new(uri.clone()), source: Box::new(source) };
                let namespace = connected.map_err(failed)?;
                let geometry = Geometry { block_bytes: namespace.block_size(), blocks: namespace.blocks() };
                Ok((geometry, Box::new(namespace)))
            }
        }
    }
}

/// Opens a channel of a bdev on this core.
pub(crate) fn open_device(
    core: &Core,
    device: &Descriptor,
) -> Result<(Geometry, Box<DynChannel>), SourceError> {
    let geometry = device.device().geometry();
    let geometry = Geometry { block_bytes: geometry.block_size, blocks: geometry.blocks };
    Ok((geometry, Box::new(device.channel(core)?)))
}

fn parse_store(body: &str, query: &str) -> Option<Source> {
    let (pool, image) = body.split_once('/').filter(|(pool, image)| !pool.is_empty() && !image.is_empty())?;
    let (mut cluster, mut etcd) = (None, EtcdOptions::default());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (option, value) = pair.split_once('=').filter(|(_, value)| !value.is_empty())?;
        match option {
            "cluster" => cluster = Some(value.to_string()),
            _ if etcd.set_parameter(option, value) => {}
            _ => return None,
        }
    }
    let default = || std::env::var("RINGBOLT_CLUSTER").unwrap_or_else(|_| CLUSTER_DEFAULT.to_string());
    let cluster = cluster.unwrap_or_else(default);
    Some(Source::Store { pool: pool.to_string(), image: image.to_string(), cluster, etcd })
}

/// A bdev of a cluster's image.
fn create_store(
    registry: &Registry,
    pool: &str,
    image: &str,
    cluster: &str,
    etcd: &EtcdOptions,
    writes: bool,
) -> Result<String, SourceError> {
    let cluster = Cluster::open(cluster.as_ref(), etcd)?;
    // One run is one user of the image, whatever its workers.
    let options = AttachOptions { read_only: !writes, same_run: true, ..AttachOptions::default() };
    let bdev = ClusterImage::open(&cluster, pool, image, options)?;
    let name = unique_name("store");
    registry.register(&name, None, &[], Arc::new(bdev))?;
    Ok(name)
}

impl Source {
    fn create_model(&self, registry: &Registry) -> Result<String, SourceError> {
        let Source::Model { profile: name, bytes, block_bytes, state, seed, store } = self else {
            unreachable!("{self:?} is no model")
        };
        let failed = |reason: String| SourceError::Profile { profile: name.clone(), reason };
        let profile = if name.contains('/') || name.ends_with(".toml") {
            let text = std::fs::read_to_string(name).map_err(|error| failed(error.to_string()))?;
            DeviceProfile::parse(&text)
        } else {
            DeviceProfile::shipped(name)
        };
        let profile = profile.map_err(|error| failed(error.to_string()))?;
        let mut config = disk::ModelConfig::new(&unique_name("model"), profile);
        let unit = u64::from(block_bytes.unwrap_or(config.profile.device.block_bytes)).max(1);
        config.block_size = *block_bytes;
        config.num_blocks = bytes.map(|bytes| bytes / unit);
        (config.state, config.seed, config.store) = (*state, *seed, *store);
        Ok(disk::create(registry, config)?.name().to_string())
    }
}

/// Parses the part of a `model:` URI after the colon.
fn parse_model(body: &str, query: &str) -> Result<Source, String> {
    if body.is_empty() {
        let known: Vec<&str> = DeviceProfile::shipped_names().collect();
        return Err(format!("names no profile: a file, or one of {}", known.join(", ")));
    }
    let (mut bytes, mut block_bytes, mut seed) = (None, None, 0);
    let (mut state, mut store) = (MediaState::default(), disk::Store::default());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let invalid = |example: &str| format!("{key}={value} is invalid; for example ?{key}={example}");
        match key {
            "size" => bytes = Some(parse_bytes(value).ok_or_else(|| invalid("16g"))?),
            "bs" => {
                let small = parse_bytes(value).and_then(|bytes| u32::try_from(bytes).ok());
                block_bytes = Some(small.ok_or_else(|| invalid("4k"))?);
            }
            "state" => state = MediaState::from_name(value).ok_or_else(|| invalid("fresh"))?,
            "seed" => seed = value.parse().map_err(|_| invalid("1"))?,
            "store" => store = disk::Store::from_name(value).ok_or_else(|| invalid("memory"))?,
            _ => return Err(format!("?{key} is none of size, bs, state, seed and store")),
        }
    }
    Ok(Source::Model { profile: body.to_string(), bytes, block_bytes, state, seed, store })
}

/// Opens a bdev for one job, for writing only if the job writes.
pub(crate) fn open(registry: &Registry, name: &str, spec: &JobSpec) -> Result<Descriptor, SourceError> {
    let access = if spec.workload.writes() { Access::ReadWrite } else { Access::ReadOnly };
    Ok(registry.open(name, access)?)
}

/// Creates a uring or AIO bdev on an existing file; the file is neither created nor extended.
fn create_uring(
    registry: &Registry,
    path: &str,
    block_bytes: u32,
    aio: bool,
    writes: bool,
) -> Result<String, SourceError> {
    let mut config = uring::UringConfig::new(&unique_name(if aio { "aio" } else { "uring" }), path);
    config.aio = aio.then(uring::AioConfig::default);
    config.readonly = !writes;
    config.block_size = (block_bytes != 0).then_some(block_bytes);
    Ok(uring::create(registry, config)?.name().to_string())
}

/// A bdev name that is unique in this process.
fn unique_name(kind: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("workload-{kind}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_parse_into_sources() {
        let cases = [
            ("null:1g", Source::Null { bytes: 1 << 30, block_bytes: 512 }),
            (
                "store:pool/a?cluster=/srv/store",
                Source::Store {
                    pool: "pool".to_string(),
                    image: "a".to_string(),
                    cluster: "/srv/store".to_string(),
                    etcd: EtcdOptions::default(),
                },
            ),
            ("malloc:64m?bs=4k", Source::Malloc { bytes: 64 << 20, block_bytes: 4096 }),
            (
                "uring:/tmp/a.img",
                Source::Uring { path: "/tmp/a.img".to_string(), block_bytes: 0, aio: false },
            ),
            (
                "aio:/tmp/a.img?bs=4k",
                Source::Uring { path: "/tmp/a.img".to_string(), block_bytes: 4096, aio: true },
            ),
            (
                "model:intel-900p?size=1g&state=fresh&seed=7&bs=4k&store=memory",
                Source::Model {
                    profile: "intel-900p".to_string(),
                    bytes: Some(1 << 30),
                    block_bytes: Some(4096),
                    state: MediaState::Fresh,
                    seed: 7,
                    store: disk::Store::Memory,
                },
            ),
            ("Malloc0", Source::Bdev { name: "Malloc0".to_string() }),
        ];
        for (text, source) in cases {
            assert_eq!(Source::parse(text).unwrap(), source, "{text}");
        }
        let uri = "nvme+tcp://127.0.0.1:4420/nqn.2025-01.io:a?ns=1";
        assert_eq!(Source::parse(uri).unwrap(), Source::Nvme { uri: uri.parse().unwrap() });
    }

    #[test]
    fn an_unknown_profile_error_lists_the_built_in_profiles() {
        let source = Source::parse("model:intel-p3800").unwrap();
        let error = source.prepare(&Registry::new(), true).unwrap_err().to_string();
        assert!(error.contains("intel-p3700"), "{error}");
    }

    #[test]
    fn invalid_uris_are_rejected_with_a_valid_example() {
        for (text, hint) in [
            ("", "null:1g"),
            ("null:", "for example null:1g"),
            ("null:0", "for example null:1g"),
            ("store:pool", "store:POOL/IMAGE"),
            ("store:pool/a?x=y", "store:POOL/IMAGE"),
            ("malloc:1g?size=4", "?bs=BYTES"),
            ("malloc:1g?bs=x", "?bs=4k"),
            ("uring:", "uring:/tmp/disk.img"),
            ("aio:", "uring:/tmp/disk.img"),
            ("model:", "samsung-980-pro"),
            ("accel:sort", "dif_generate_copy"),
            ("accel:copy?size=4", "no multiple of 8"),
            ("model:ideal?state=old", "?state=fresh"),
            ("model:ideal?colour=red", "none of size, bs"),
            ("file:/tmp/x", "uring:"),
        ] {
            let error = Source::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
