//! What a job drives: fio's `filename`, as a URI.

use std::sync::atomic::{AtomicU64, Ordering};

use bdev::{Access, BdevError, Descriptor, Registry, malloc, null, uring};
use model::{Profile, State, disk};

use crate::spec::JobSpec;
use crate::units::parse_bytes;

/// A device by URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `null:SIZE[?bs=BYTES]`: nothing, at once.
    Null {
        /// Size.
        bytes: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// `malloc:SIZE[?bs=BYTES]`: memory.
    Malloc {
        /// Size.
        bytes: u64,
        /// Bytes of a block.
        block_bytes: u32,
    },
    /// `uring:PATH[?bs=BYTES]`: a file or block device through io_uring.
    Uring {
        /// The file.
        path: String,
        /// Bytes of a block; 0 for what the file prefers.
        block_bytes: u32,
    },
    /// `model:PROFILE[?size=BYTES&bs=BYTES&state=fresh|steady&seed=N&store=none|memory]`: a device made of
    /// software that takes its time.
    Model {
        /// A profile that is shipped, or a file.
        profile: String,
        /// Size; `None` for the profile's.
        bytes: Option<u64>,
        /// Bytes of a block; `None` for the profile's.
        block_bytes: Option<u32>,
        /// What was written to it before.
        state: State,
        /// Decides its latencies.
        seed: u64,
        /// What becomes of the data.
        store: disk::Store,
    },
    /// `nvme+tcp://HOST:PORT/SUBNQN?ns=N` and the driver's other ways to a namespace.
    Nvme {
        /// The namespace.
        uri: nvme::Uri,
    },
    /// Anything else: a bdev that the configuration made.
    Bdev {
        /// Its name.
        name: String,
    },
}

/// Why a source cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Not a URI of the kinds above.
    #[error("--filename={text}: {reason}")]
    Syntax {
        /// What was given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A profile that cannot be used.
    #[error("--filename=model:{profile}: {reason}")]
    Profile {
        /// Which.
        profile: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The layer refused.
    #[error(transparent)]
    Bdev(#[from] BdevError),
    /// The target did not answer as it should.
    #[error("{uri}: {source}")]
    Fabric {
        /// The target.
        uri: Box<nvme::Uri>,
        /// What went wrong.
        source: Box<nvme::OpenError>,
    },
}

/// A source on which channels can be opened.
#[derive(Clone, Debug)]
pub(crate) enum Prepared {
    /// A device of the registry.
    Bdev { name: String },
    /// A namespace that the driver reaches.
    Nvme { uri: nvme::Uri },
}

const BLOCK_BYTES_DEFAULT: u32 = 512;

impl Source {
    /// From the URI.
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
            "uring" if body.is_empty() => Err(syntax("names no file; for example uring:/tmp/disk.img")),
            "uring" => Ok(Source::Uring { path: body.to_string(), block_bytes: block_bytes.unwrap_or(0) }),
            _ => Err(syntax("is none of null:, malloc:, uring:, model:, nvme+tcp:// or a bdev's name")),
        }
    }

    /// Makes the device where it is to be made.
    pub(crate) fn prepare(&self, registry: &Registry) -> Result<Prepared, SourceError> {
        let name = match self {
            Source::Null { bytes, block_bytes } => {
                let blocks = bytes / u64::from((*block_bytes).max(1));
                let config = null::NullConfig::new(&fresh_name("null"), blocks, *block_bytes);
                null::create(registry, config)?.name().to_string()
            }
            Source::Malloc { bytes, block_bytes } => {
                let blocks = bytes / u64::from((*block_bytes).max(1));
                let config = malloc::MallocConfig::new(&fresh_name("malloc"), blocks, *block_bytes);
                malloc::create(registry, config)?.name().to_string()
            }
            Source::Uring { path, block_bytes } => create_uring(registry, path, *block_bytes)?,
            Source::Model { .. } => self.create_model(registry)?,
            Source::Nvme { uri } => return Ok(Prepared::Nvme { uri: uri.clone() }),
            Source::Bdev { name } => name.clone(),
        };
        Ok(Prepared::Bdev { name })
    }
}

impl Source {
    fn create_model(&self, registry: &Registry) -> Result<String, SourceError> {
        let Source::Model { profile: name, bytes, block_bytes, state, seed, store } = self else {
            unreachable!("{self:?} is no model")
        };
        let failed = |reason: String| SourceError::Profile { profile: name.clone(), reason };
        let profile = if name.contains('/') || name.ends_with(".toml") {
            let text = std::fs::read_to_string(name).map_err(|error| failed(error.to_string()))?;
            Profile::parse(&text)
        } else {
            Profile::shipped(name)
        };
        let profile = profile.map_err(|error| failed(error.to_string()))?;
        let mut config = disk::ModelConfig::new(&fresh_name("model"), profile);
        let unit = u64::from(block_bytes.unwrap_or(config.profile.device.block_bytes)).max(1);
        config.block_size = *block_bytes;
        config.num_blocks = bytes.map(|bytes| bytes / unit);
        (config.state, config.seed, config.store) = (*state, *seed, *store);
        Ok(disk::create(registry, config)?.name().to_string())
    }
}

/// The part of a `model:` URI behind the colon.
fn parse_model(body: &str, query: &str) -> Result<Source, String> {
    if body.is_empty() {
        let known: Vec<&str> = Profile::shipped_names().collect();
        return Err(format!("names no profile: a file, or one of {}", known.join(", ")));
    }
    let (mut bytes, mut block_bytes, mut seed) = (None, None, 0);
    let (mut state, mut store) = (State::default(), disk::Store::default());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let wrong = |example: &str| format!("{key}={value} cannot be; for example ?{key}={example}");
        match key {
            "size" => bytes = Some(parse_bytes(value).ok_or_else(|| wrong("16g"))?),
            "bs" => {
                let small = parse_bytes(value).and_then(|bytes| u32::try_from(bytes).ok());
                block_bytes = Some(small.ok_or_else(|| wrong("4k"))?);
            }
            "state" => state = State::from_name(value).ok_or_else(|| wrong("fresh"))?,
            "seed" => seed = value.parse().map_err(|_| wrong("1"))?,
            "store" => store = disk::Store::from_name(value).ok_or_else(|| wrong("memory"))?,
            _ => return Err(format!("?{key} is none of size, bs, state, seed and store")),
        }
    }
    Ok(Source::Model { profile: body.to_string(), bytes, block_bytes, state, seed, store })
}

/// Opens a device for one job.
pub(crate) fn open(registry: &Registry, name: &str, spec: &JobSpec) -> Result<Descriptor, SourceError> {
    let access = if spec.workload.writes() { Access::ReadWrite } else { Access::ReadOnly };
    Ok(registry.open(name, access)?)
}

/// A file that is there; nothing is made or grown.
fn create_uring(registry: &Registry, path: &str, block_bytes: u32) -> Result<String, SourceError> {
    let mut config = uring::UringConfig::new(&fresh_name("uring"), path);
    config.block_size = (block_bytes != 0).then_some(block_bytes);
    Ok(uring::create(registry, config)?.name().to_string())
}

/// A name that no configuration gives.
fn fresh_name(kind: &str) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    format!("workload-{kind}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_name_what_they_say() {
        let cases = [
            ("null:1g", Source::Null { bytes: 1 << 30, block_bytes: 512 }),
            ("malloc:64m?bs=4k", Source::Malloc { bytes: 64 << 20, block_bytes: 4096 }),
            ("uring:/tmp/a.img", Source::Uring { path: "/tmp/a.img".to_string(), block_bytes: 0 }),
            (
                "model:intel-900p?size=1g&state=fresh&seed=7&bs=4k&store=memory",
                Source::Model {
                    profile: "intel-900p".to_string(),
                    bytes: Some(1 << 30),
                    block_bytes: Some(4096),
                    state: State::Fresh,
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
    fn a_profile_that_is_not_there_names_those_that_are() {
        let source = Source::parse("model:intel-p3800").unwrap();
        let error = source.prepare(&Registry::new()).unwrap_err().to_string();
        assert!(error.contains("intel-p3700"), "{error}");
    }

    #[test]
    fn what_is_none_says_what_would_be() {
        for (text, hint) in [
            ("", "null:1g"),
            ("null:", "for example null:1g"),
            ("null:0", "for example null:1g"),
            ("malloc:1g?size=4", "?bs=BYTES"),
            ("malloc:1g?bs=x", "?bs=4k"),
            ("uring:", "uring:/tmp/disk.img"),
            ("model:", "samsung-980-pro"),
            ("model:ideal?state=old", "?state=fresh"),
            ("model:ideal?colour=red", "none of size, bs"),
            ("file:/tmp/x", "uring:"),
        ] {
            let error = Source::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }
}
