//! `up --nodes`: several nodes, each in a process of its own.
//!
//! Invariant: however this process ends, its nodes end.
//! Invariant: the nodes serve on if one of them exits.

use super::{program, quoted};
use crate::cli::child::Server;
use crate::cli::{Done, Failure, signals};
use farside::NewStore;
use farside::config::make_folder_of;
use farside::parts::join_urls;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Interval at which exited nodes are noticed.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// A node that this command has started.
struct Node {
    server: Server,
    url: String,
    is_serving: bool,
}

/// Starts `count` nodes with these arguments of `serve`, creates a store over all of them, and prints their pool.
/// Serves until a signal arrives or no node is left.
///
/// # Errors
/// A node does not start, or the store cannot be created: the nodes are ended. Or all nodes have exited by themselves.
pub(super) fn run(count: u32, socket: &Path, arguments: &[String], store: &NewStore) -> Done {
    // The first step, so that no signal is missed.
    let mut signals = signal_hook::iterator::Signals::new(signals::ending())?;
    let socket = std::path::absolute(socket)?;
    make_folder_of(&socket).map_err(Failure::Error)?;
    let mut nodes = Vec::new();
    for number in 0..count {
        match start(&numbered(&socket, number), arguments) {
            Ok(node) => nodes.push(node),
            Err(failure) => {
                stop(&mut nodes)?;
                return Err(failure);
            }
        }
    }
    let (program, pool) = (quoted(&program()?), join_urls(nodes.iter().map(|node| &*node.url)));
    if let Err(error) = farside::connect(&pool).and_then(|pool| pool.create_store(store)) {
        stop(&mut nodes)?;
        return Err(error.into());
    }
    let hints = format!(
        "farside: pool {pool}\n\
         Try in another terminal:\n  \
         {program} info --pool {pool}\n  \
         {program} kv put greeting hello --pool {pool} --store default\n\
         Press Ctrl-C to stop; the memory is gone then.\n",
        pool = quoted(&pool)
    );
    // A script may close the pipe after the first lines, which say that the nodes serve.
    let _unread = std::io::stdout().write_all(hints.as_bytes());
    loop {
        if let Some(signal) = signals.pending().next() {
            tracing::info!(
                "stopping on {}",
                signal_hook::low_level::signal_name(signal).unwrap_or("a signal")
            );
            return stop(&mut nodes);
        }
        for (number, node) in nodes.iter_mut().enumerate().filter(|(_, node)| node.is_serving) {
            if let Some(status) = node.server.has_ended()? {
                node.is_serving = false;
                tracing::warn!("node {number} at {} has exited ({status}); its memory is gone", node.url);
            }
        }
        if !nodes.iter().any(|node| node.is_serving) {
            return Err(Failure::Error("all nodes have exited: their output above has the reasons".into()));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Asks all nodes to end, and waits until they have. Each removes its socket.
fn stop(nodes: &mut [Node]) -> Done {
    nodes.iter().for_each(|node| node.server.ask_to_end());
    for node in nodes {
        node.server.wait()?;
    }
    Ok(())
}

/// Starts a node and prints its first line, which says that it serves.
fn start(socket: &Path, arguments: &[String]) -> Result<Node, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", "--die-with-parent", "--socket"]).arg(socket).args(arguments);
    let (server, line) = Server::start_and_read_line(&mut command)?;
    if line.is_empty() {
        return Err(Failure::Error(format!(
            "the node at {} did not start: its output above has the reason; the other nodes were stopped",
            socket.display()
        )));
    }
    print_line!("{}", line.trim_end());
    Ok(Node { server, url: format!("shm:{}", socket.display()), is_serving: true })
}

/// Adds the node's number to the name of a socket: `default.sock` becomes `default-1.sock`.
fn numbered(socket: &Path, number: u32) -> PathBuf {
    let mut name = socket.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{number}"));
    if let Some(extension) = socket.extension() {
        name.push(".");
        name.push(extension);
    }
    socket.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_gets_the_nodes_number() {
        for (socket, expected) in [
            ("/run/default.sock", "/run/default-2.sock"),
            ("/run/node", "/run/node-2"),
            ("a.b.sock", "a.b-2.sock"),
        ] {
            assert_eq!(numbered(Path::new(socket), 2), Path::new(expected));
        }
    }
}
