//! `volume replace`: moves a replica to another node, or back to a node that has lost its memory.

use super::rate;
use crate::cli::{Done, Failure, Target, progress};
use farside::volume::Replaced;
use std::time::Instant;

/// Replace a replica by one on another node, or by a new one on the node that has lost its memory.
#[derive(clap::Args)]
pub(super) struct Replace {
    /// Name of the volume
    name: String,
    /// Number of the replica, as 'volume stat' shows it
    #[arg(long, value_name = "I")]
    replica: u32,
    /// Number of the group of the replica
    #[arg(long, value_name = "G", default_value_t = 0)]
    group: u32,
    /// URL of the node that is to hold the replica
    #[arg(long, value_name = "URL")]
    by: String,
    /// Bytes to copy a second, at most [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = rate)]
    rate: Option<u64>,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Replace {
    pub(super) fn run(self, pool: &farside::Pool, target: &Target) -> Done {
        let node = Target { pool: Some(self.by.clone()), ..target.clone() }.connect()?;
        if node.nodes().len() != 1 {
            return Err(Failure::Error(format!("'{}' is not one node: name the one for --by", self.by)));
        }
        let (began, bar) = (Instant::now(), progress("comparing blocks", 0, self.quiet));
        let tell = |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        };
        let (group, replica) = (self.group as usize, self.replica as usize);
        let replaced = pool.replace_replica(&self.name, group, replica, &node, self.rate, tell)?;
        bar.finish_and_clear();
        let Replaced { configuration, filled, levelled } = replaced;
        let seconds = began.elapsed().as_secs_f64();
        if self.json {
            print_line!(
                "{}",
                serde_json::json!({
                    "configuration": configuration,
                    "blocks_copied": filled.blocks + levelled.blocks,
                    "blocks_copied_while_clients_waited": levelled.blocks,
                    "seconds": seconds,
                })
            );
            return Ok(());
        }
        print_line!(
            "replica {replica} of group {group} is at {} now: {} blocks copied in {seconds:.1} s, {} of them while \
             clients waited; configuration {configuration} serves",
            node.url(),
            filled.blocks + levelled.blocks,
            levelled.blocks
        );
        if pool.nodes().all(|known| known.url() != node.url()) {
            note!("farside: add {} to the pool of all clients: this volume needs it now", node.url());
        }
        Ok(())
    }
}
