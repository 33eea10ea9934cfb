//! The node that is measured: one that is named, or a child of this process that serves whatever fabrics are asked for.
//!
//! Invariant: a child ends with its [`NodeProcess`], and with this process however that ends. What it has on disk goes
//! too, but for an empty folder where this process is killed.

use super::Asked;
use crate::cli::bench::FabricArg;
use crate::cli::child::Server;
use crate::cli::files::Folder;
use crate::cli::{Failure, connect};
use farside::Pool;
use farside::config::{File, Settings};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// A child `farside serve` that ends with this process.
pub(in crate::cli) struct NodeProcess {
    server: Server,
    socket: PathBuf,
    /// How it is reached where engines serve.
    options: farside::Options,
    // After the server: what lies in it is the server's.
    _folder: Folder,
}

/// Of a node of TLS: no longer on disk than it takes it to read them.
const SECRETS: [&str; 2] = ["node.cert", "node.key"];

impl NodeProcess {
    /// Starts a node with so much memory and waits until it serves.
    pub(in crate::cli) fn start(memory: u64, fabrics: &[FabricArg]) -> Result<NodeProcess, Failure> {
        let folder = Folder::make("bench").map_err(Failure::Told)?;
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
        let mut server = Server::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let mut line = String::new();
        // Left open: the node has more to say, and would die of a pipe that nobody has.
        if let Some(output) = server.stdout() {
            BufReader::new(output).read_line(&mut line)?;
        }
        for name in SECRETS {
            // It has read them, or it has said why not.
            let _never_there = std::fs::remove_file(folder.path().join(name));
        }
        if line.is_empty() {
            return Err(Failure::Told("the node did not start; what it said stands above".into()));
        }
        Ok(NodeProcess { server, socket, options, _folder: folder })
    }

    pub(super) fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The node as that fabric reaches it, which it was asked to be reached by.
    ///
    /// # Errors
    /// It is gone.
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

/// Where the engine of a node with that folder serves, if it has one, and how that is reached.
fn listening(fabric: FabricArg, folder: &Path) -> Result<(Vec<String>, farside::Options), Failure> {
    let at = |url: String| (vec!["--listen".to_owned(), url], farside::Options::default());
    Ok(match fabric {
        FabricArg::Local | FabricArg::Shm => (Vec::new(), farside::Options::default()),
        FabricArg::Udp => at("udp://127.0.0.1:0".into()),
        FabricArg::Tcp => at("tcp://127.0.0.1:0".into()),
        #[cfg(feature = "tls")]
        FabricArg::Tls => {
            let [shown, key] = SECRETS.map(|name| folder.join(name));
            let made = crate::cli::tls::Certificate::new(&["127.0.0.1".into()], 1).map_err(Failure::Told)?;
            made.write(&shown, &key).map_err(Failure::Told)?;
            let (mut listen, options) = at("tls://127.0.0.1:0".into());
            listen.extend(["--tls-cert".into(), shown.display().to_string()]);
            listen.extend(["--tls-key".into(), key.display().to_string()]);
            (listen, farside::Options { tls_ca: Some(made.text), ..options })
        }
        FabricArg::Ring => at(format!("ring:{}", folder.join("ring").display())),
    })
}

/// The node that is named, or one that is started with so much memory.
pub(super) fn reach(
    asked: &Asked,
    memory: u64,
    also: &[FabricArg],
) -> Result<(Pool, Option<Arc<NodeProcess>>), Failure> {
    let there = &asked.there;
    match (&there.pool, asked.fabric.unwrap_or(FabricArg::Shm)) {
        (Some(url), _) => {
            let settings = Settings::resolve(File {
                pool: Some(url.clone()),
                token_file: there.token_file.clone(),
                tls_ca: there.tls_ca.clone(),
                ..File::default()
            });
            let settings = settings.map_err(Failure::Told)?;
            let pool = connect(&Settings { insecure_udp: there.insecure_udp, ..settings })?;
            if let Some(fabric) = asked.fabric.filter(|fabric| fabric.name() != pool.fabric()) {
                return Err(Failure::Told(format!(
                    "the node of --pool is reached by {}, not by {}: leave --fabric out",
                    pool.fabric(),
                    fabric.name()
                )));
            }
            Ok((pool, None))
        }
        (None, FabricArg::Local) => Ok((Pool::serve_here(memory)?, None)),
        (None, fabric) => {
            let node = NodeProcess::start(memory, &[&[fabric], also].concat())?;
            Ok((node.pool(fabric)?, Some(Arc::new(node))))
        }
    }
}
