//! Connects to the node under measurement: an existing node, or a child process that serves the requested fabrics.
//!
//! Invariant: the child process ends with its [`NodeProcess`], and also with this process, however this process ends.
//! Invariant: the child's files are removed when it ends. If this process is killed, an empty folder may remain.

use super::SessionConfig;
use crate::cli::bench::{ExistingNode, FabricArg};
use crate::cli::child::Server;
use crate::cli::files::Folder;
use crate::cli::{Failure, connect};
use farside::Pool;
use farside::config::{File, Settings};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// A child process `farside serve`, which ends with this process.
pub(in crate::cli) struct NodeProcess {
    server: Server,
    socket: PathBuf,
    /// Options with which clients connect to the node's engines.
    options: farside::Options,
    // The folder is dropped after the server, which uses the files in it.
    _folder: Folder,
}

/// Names of a TLS node's certificate and key files. They are removed as soon as the node has read them.
const SECRETS: [&str; 2] = ["node.cert", "node.key"];

impl NodeProcess {
    /// Starts a node that lends `memory` bytes over `fabrics`, and waits until it serves.
    pub(in crate::cli) fn start(memory: u64, fabrics: &[FabricArg]) -> Result<NodeProcess, Failure> {
        let folder = Folder::make("bench").map_err(Failure::Error)?;
        let socket = folder.path().join("node.sock");
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["serve", "--die-with-parent", "--memory", &memory.to_string(), "--socket"])
            .arg(&socket);
        let mut options = farside::Options::default();
        for &fabric in fabrics {
            let (listen, by) = listening(fabric, folder.path())?;
            command.args(listen);
            options.tls_ca = options.tls_ca.or(by.tls_ca);
        }
        let (server, line) = Server::start_and_read_line(&mut command)?;
        for name in SECRETS {
            // The node has read the files or has failed. Without TLS, the files do not exist.
            let _absent_without_tls = std::fs::remove_file(folder.path().join(name));
        }
        if line.is_empty() {
            return Err(Failure::Error("the node did not start: its output above has the reason".into()));
        }
        Ok(NodeProcess { server, socket, options, _folder: folder })
    }

    pub(super) fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// Connects to the node over `fabric`, which must be shm or one of the fabrics with which the node was started.
    ///
    /// # Errors
    /// The node is gone.
    pub(in crate::cli) fn pool(&self, fabric: FabricArg) -> Result<Pool, Failure> {
        let pool = farside::connect(&format!("shm:{}", self.socket.display()))?;
        let listening = pool.info()?.listening;
        let is_meant = |url: &&String| url.split(':').next() == Some(fabric.name());
        Ok(match listening.iter().find(is_meant) {
            Some(url) => farside::connect_with(url, &self.options)?,
            None => pool,
        })
    }
}

/// Returns the arguments with which a node serves `fabric`, and the options with which clients connect to it. Sockets
/// and rings are created in `folder`.
fn listening(fabric: FabricArg, folder: &Path) -> Result<(Vec<String>, farside::Options), Failure> {
    let at = |url: String| (vec!["--listen".to_owned(), url], farside::Options::default());
    Ok(match fabric {
        FabricArg::Local | FabricArg::Shm => (Vec::new(), farside::Options::default()),
        FabricArg::Udp => at("udp://127.0.0.1:0".into()),
        FabricArg::Tcp => at("tcp://127.0.0.1:0".into()),
        #[cfg(feature = "tls")]
        FabricArg::Tls => {
            let [certificate, key] = SECRETS.map(|name| folder.join(name));
            let made = crate::cli::tls::Certificate::new(&["127.0.0.1".into()], 1).map_err(Failure::Error)?;
            made.write(&certificate, &key).map_err(Failure::Error)?;
            let (mut listen, options) = at("tls://127.0.0.1:0".into());
            listen.extend(["--tls-cert".into(), certificate.display().to_string()]);
            listen.extend(["--tls-key".into(), key.display().to_string()]);
            (listen, farside::Options { tls_ca: Some(made.text), ..options })
        }
        FabricArg::Ring => at(format!("ring:{}", folder.join("ring").display())),
        #[cfg(feature = "verbs")]
        FabricArg::Verbs => {
            let devices = farside_fabrics::verbs::device::devices();
            let devices = devices.map_err(|error| Failure::Error(error.to_string()))?;
            at(format!("verbs://{}:0?host=127.0.0.1", devices[0].name))
        }
    })
}

impl ExistingNode {
    /// Connects to the nodes that the user named.
    pub(in crate::cli::bench) fn connect(&self) -> Result<Pool, Failure> {
        let settings = Settings::resolve(File {
            pool: self.pool.clone(),
            token_file: self.token_file.clone(),
            tls_ca: self.tls_ca.clone(),
            ..File::default()
        });
        let settings = settings.map_err(Failure::Error)?;
        connect(&Settings { insecure_udp: self.insecure_udp, ..settings })
    }
}

/// Connects to the nodes that the plan names, or starts as many as it needs. Each lends `memory`
/// bytes.
pub(super) fn reach(
    config: &SessionConfig,
    memory: u64,
    also: &[FabricArg],
) -> Result<(Pool, Vec<Arc<NodeProcess>>), Failure> {
    let count = config.nodes();
    let existing = &config.existing;
    match (&existing.pool, config.fabric.unwrap_or(FabricArg::Shm)) {
        (Some(_), _) => {
            let pool = existing.connect()?;
            if let Some(fabric) = config.fabric.filter(|fabric| fabric.name() != pool.fabric()) {
                return Err(Failure::Error(format!(
                    "the URL of --pool is of fabric {}, not {}: omit --fabric",
                    pool.fabric(),
                    fabric.name()
                )));
            }
            Ok((pool, Vec::new()))
        }
        (None, FabricArg::Local) => {
            let pools = (0..count).map(|_| Pool::serve_here(memory)).collect::<Result<Vec<_>, _>>()?;
            Ok((Pool::joined(&pools), Vec::new()))
        }
        (None, fabric) => {
            let fabrics = [&[fabric], also].concat();
            let start = |_| NodeProcess::start(memory, &fabrics).map(Arc::new);
            let nodes = (0..count).map(start).collect::<Result<Vec<_>, _>>()?;
            let pools = nodes.iter().map(|node| node.pool(fabric)).collect::<Result<Vec<_>, _>>()?;
            Ok((Pool::joined(&pools), nodes))
        }
    }
}
