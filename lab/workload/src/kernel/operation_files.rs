//! The files and directories of jobs that create, query or delete them.

use io_engines::{EngineFile, MetadataOperation};

use super::paths;
use crate::jobfile::PerfJob;
use crate::run::RunError;

/// Creates what the job queries or deletes, after all names were checked and before any copy starts. A name
/// that is of another kind than the job's files, such as a device or a symbolic link, is rejected, so that
/// none is ever deleted.
pub(super) fn prepare(job: &PerfJob, operation: MetadataOperation) -> Result<(), RunError> {
    let of_directories = operation.is_of_directories();
    let copies = if job.filenames.is_empty() { job.numjobs } else { 1 };
    let mut missing = Vec::new();
    for path in (0..copies).flat_map(|number| paths(job, number)) {
        match std::fs::symlink_metadata(&path) {
            Ok(found) if found.is_dir() != of_directories || !(found.is_dir() || found.is_file()) => {
                let kind = if of_directories { "directory" } else { "regular file" };
                return Err(RunError::Options(format!("{path} is not a {kind}")));
            }
            Ok(_) => {}
            Err(_) => missing.push(path),
        }
    }
    if operation.creates() {
        return Ok(());
    }
    if let (Some(path), false) = (missing.first(), job.allow_file_create) {
        return Err(RunError::Options(format!("{path}: no such file, and --allow_file_create=0")));
    }
    for path in &missing {
        if of_directories {
            std::fs::create_dir(path)
                .map_err(|error| RunError::Machine { what: format!("{path}: create"), error })?;
        } else {
            EngineFile::lay_out(path, job.operation_file_bytes, false, job.spec.seed)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::JobRunner;
    use crate::jobfile::{Lookup, plan};
    use std::path::Path;
    use std::sync::{Arc, atomic::AtomicBool};

    struct NoFiles;

    impl Lookup for NoFiles {
        fn file(&self, path: &str) -> Result<String, String> {
            Err(format!("{path}: no such file"))
        }

        fn variable(&self, _: &str) -> Option<String> {
            None
        }
    }

    /// Runs one job of five files in a directory; returns its reads and bytes, or the error.
    fn run(directory: &Path, options: &str) -> Result<(u64, u64, bool), String> {
        let line = format!("--name=a --thread --nrfiles=5 --directory={} {options}", directory.display());
        let words: Vec<String> = line.split_whitespace().map(str::to_string).collect();
        let plan = plan(&words, &NoFiles).map_err(|error| error.to_string())?;
        let stop = Arc::new(AtomicBool::new(false));
        let runner = JobRunner { plan: &plan, bdev_reactors: None, worker: Vec::new(), stop };
        let finished = runner.run(&mut |_| ()).map_err(|error| error.to_string())?;
        let result = &finished[0].result;
        Ok((result.directions[0].total_ios, result.directions[0].bytes, result.is_clean()))
    }

    fn names(directory: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// fio 3.33 reports 5 reads of 20,480 bytes for the engines of files, and leaves the same names; it has
    /// those of directories only since later versions, which are taken to count alike.
    #[test]
    fn each_file_is_one_io_and_names_are_those_of_fio() {
        let directory = std::env::temp_dir().join(format!("ringbolt-file-operations-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let five = ["a.0.0", "a.0.1", "a.0.2", "a.0.3", "a.0.4"];
        let none: [&str; 0] = [];
        for (engine, left) in [
            ("filecreate", five.as_slice()),
            ("filestat", &five),
            ("filedelete", &none),
            ("filestat", &five),
            ("filedelete", &none),
            ("dircreate", &five),
            ("dirstat", &five),
            ("dirdelete", &none),
            ("dirdelete", &none),
        ] {
            let outcome = run(&directory, &format!("--ioengine={engine} --filesize=4k"));
            assert_eq!(outcome, Ok((5, 20_480, true)), "{engine}");
            assert_eq!(names(&directory), left, "{engine}");
        }
        // What is there already is neither created again as a directory nor deleted as a file.
        std::fs::create_dir(directory.join("a.0.3")).unwrap();
        let error = run(&directory, "--ioengine=filedelete --filesize=4k").unwrap_err();
        assert!(error.contains("a.0.3 is not a regular file"), "{error}");
        assert_eq!(names(&directory), ["a.0.3"]);
        let (_, _, is_clean) = run(&directory, "--ioengine=dircreate").unwrap();
        assert!(!is_clean);
        let error = run(&directory, "--ioengine=filestat --filesize=4k --verify=crc32c").unwrap_err();
        assert!(error.contains("verify"), "{error}");
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
