//! `volume`: creates, lists, reads, writes, checks and drops volumes.
//!
//! - `bytes`: copies bytes between a volume and a file.
//! - `replace`: replaces a replica.
//! - `scrub`: compares the replicas of all blocks.

mod bytes;
mod replace;
mod scrub;

use super::{Done, Failure, Target, human_bytes};
use farside::config::parse_bytes;
use farside::volume::{
    DroppedVolume, NewVolume, ReplicaMemory, VolumeInfo, VolumeStat, VolumeState, WriterIds,
};
use farside_systems::blocks::abd_lock;
use farside_systems::registry::names;
use farside_systems::system::Family;
use serde_json::{Value, json};
use std::time::Duration;

/// Create, list, read, write, check and drop volumes: arrays of bytes on several nodes.
#[derive(clap::Args)]
pub(super) struct Volume {
    #[command(flatten)]
    target: Target,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Create a volume. All of its bytes are zeros
    Create(Create),
    /// List the volumes
    List {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Show the state of each replica of a volume
    Stat {
        /// Name of the volume
        name: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Write bytes of a volume to a file or to standard output
    Read(bytes::Read),
    /// Write the bytes of a file or of standard input to a volume
    Write(bytes::Write),
    /// Compare all replicas of each block by tag and bytes, and repair those that are behind
    Scrub(scrub::Scrub),
    /// Replace a replica by one on another node, or by a new one on a node that has lost its memory
    Replace(replace::Replace),
    /// Drop a volume with all of its bytes
    Drop {
        /// Name of the volume
        name: String,
        /// Drop the rest of a volume whose deciding nodes are gone for good, and do not answer or are not in the pool
        #[arg(long)]
        forget: bool,
    },
}

#[derive(clap::Args)]
struct Create {
    /// Name of the volume: 1 to 50 letters, digits, '-', '_' or '.'
    name: String,
    /// Size of the volume, such as 1GiB
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    size: u64,
    /// Length of a block: a multiple of 512, at most 32KiB
    #[arg(long, value_name = "BYTES", default_value = "4KiB", value_parser = block)]
    block: u32,
    /// Number of replicas of each block, each on a node of its own: 3 survive the loss of one, 5 of two, 1 of none
    #[arg(long, value_name = "N", default_value_t = 3)]
    replicas: u32,
    /// Number of groups of replicas over which the blocks are striped [default: as many as there are nodes for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    groups: Option<u32>,
    /// Bytes of memory on each node that holds a replica: a multiple of 1MiB; with less than the default, not all
    /// blocks can be written [default: enough for all blocks]
    #[arg(long, value_name = "BYTES", value_parser = super::quota)]
    quota: Option<u64>,
    #[arg(long, default_value = farside_systems::blocks::prism_rs::KIND, help = help_of_kind())]
    kind: String,
    /// Length of clients' leases, such as 1s, in systems with locks: after this time, the locks of a dead client are
    /// taken from it [default: no leases]
    #[arg(long, value_name = "TIME", value_parser = super::duration)]
    leases: Option<Duration>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn help_of_kind() -> String {
    format!("System of the volume: {}", names(Family::Blocks))
}

/// Parses, for clap, the length of a block.
pub(super) fn block(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| (512..=32 << 10).contains(bytes) && bytes % 512 == 0)
        .ok_or_else(|| format!("'{text}' is not a length of blocks: give a multiple of 512, at most 32KiB"))
}

impl Volume {
    pub(super) fn run(self) -> Done {
        let pool = self.target.connect()?;
        match self.action {
            Action::Create(create) => create.run(&pool),
            Action::List { json } => list(&pool, json),
            Action::Stat { name, json } => stat(&pool, &name, json),
            Action::Read(read) => read.run(&pool),
            Action::Write(write) => write.run(&pool),
            Action::Scrub(scrub) => scrub.run(&pool),
            Action::Replace(replace) => replace.run(&pool, &self.target),
            Action::Drop { name, forget } => {
                let dropped = match forget {
                    true => pool.forget_volume(&name)?,
                    false => pool.drop_volume(&name)?,
                };
                tell_dropped(&name, &dropped)
            }
        }
    }
}

impl Create {
    fn run(self, pool: &farside::Pool) -> Done {
        let new = NewVolume {
            name: self.name,
            size: self.size,
            block: self.block,
            replicas: self.replicas as usize,
            groups: self.groups.map(|groups| groups as usize),
            quota: self.quota,
            kind: self.kind,
            leases: self.leases,
        };
        let made = pool.create_volume(&new)?;
        if self.json {
            print_line!("{}", as_json(&made));
            return Ok(());
        }
        print_line!(
            "volume '{}' has {} in {} blocks of {}, {}; {} of memory on each of {} nodes",
            made.name,
            human_bytes(made.size),
            made.size / u64::from(made.block),
            human_bytes(made.block.into()),
            replicas(&made),
            human_bytes(made.quota),
            made.replicas * made.groups
        );
        Ok(())
    }
}

fn replicas(of: &VolumeInfo) -> String {
    let plural = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    format!("{} in {}", plural(of.replicas, "replica"), plural(of.groups, "group"))
}

fn as_json(of: &VolumeInfo) -> Value {
    json!({
        "name": of.name,
        "kind": of.kind,
        "size_bytes": of.size,
        "block_bytes": of.block,
        "replicas": of.replicas,
        "groups": of.groups,
        "quota_bytes": of.quota,
        "state": state(of.state),
        "missing_groups": match of.state { VolumeState::Lacks(groups) => groups, _ => 0 },
    })
}

fn state(state: VolumeState) -> &'static str {
    match state {
        VolumeState::Whole => "whole",
        VolumeState::Lacks(_) => "lacks",
        VolumeState::Leftover => "leftover",
    }
}

fn list(pool: &farside::Pool, json: bool) -> Done {
    for of in pool.volumes()? {
        if json {
            print_line!("{}", as_json(&of));
            continue;
        }
        let rest = match of.state {
            VolumeState::Whole => format!(
                "{}\tblocks of {}\t{}",
                human_bytes(of.size),
                human_bytes(of.block.into()),
                replicas(&of)
            ),
            VolumeState::Lacks(groups) => format!("{}; {groups} groups were not found", replicas(&of)),
            VolumeState::Leftover => format!(
                "not a volume: what a client that created or dropped it has left; 'farside volume drop {}' frees it",
                of.name
            ),
        };
        print_line!("{}\t{}\t{rest}", of.name, of.kind);
    }
    Ok(())
}

fn stat(pool: &farside::Pool, name: &str, json: bool) -> Done {
    let stat = pool.volume_stat(name)?;
    let VolumeStat { size, block, kind, groups } = &stat;
    if json {
        let replica = |replica: &farside::volume::ReplicaStat| {
            let mut object = json!({
                "url": replica.url,
                "incarnation": replica.incarnation,
                "reachable": replica.memory.is_ok(),
            });
            match &replica.memory {
                Ok(memory) => {
                    object["blocks_written"] = memory.blocks_written.into();
                    object["buffers_free"] = memory.buffers_free.into();
                    object["buffers_retired"] = memory.buffers_retired.into();
                    object["buffers_leaked"] = memory.buffers_leaked.into();
                }
                Err(reason) => object["error"] = reason.as_str().into(),
            }
            object
        };
        let group = |group: &farside::volume::GroupStat| {
            let ids = group.writer_ids.as_ref().ok().copied().flatten();
            let mut object = json!({
                "store": group.store,
                "configuration": group.configuration,
                "blocks": group.blocks,
                "writer_ids": ids.map(|WriterIds { claimed, of }| json!({ "claimed": claimed, "of": of })),
                "replicas": group.replicas.iter().map(replica).collect::<Vec<Value>>(),
            });
            if let Err(reason) = &group.writer_ids {
                object["writer_ids_error"] = reason.as_str().into();
            }
            object
        };
        let groups: Vec<Value> = groups.iter().map(group).collect();
        print_line!(
            "{}",
            json!({ "name": name, "kind": kind, "size_bytes": size, "block_bytes": block, "groups": groups })
        );
        warn_of_scarce_ids(name, &stat);
        return Ok(());
    }
    print_line!(
        "volume '{name}' is {kind}, {} in blocks of {}",
        human_bytes(*size),
        human_bytes((*block).into())
    );
    for (number, group) in groups.iter().enumerate() {
        print_line!(
            "group {number}: {} blocks, configuration {}, store '{}'",
            group.blocks,
            group.configuration,
            group.store
        );
        for (index, replica) in group.replicas.iter().enumerate() {
            match &replica.memory {
                Ok(_) if *kind == abd_lock::KIND => print_line!(
                    "  replica {index}: has memory for all blocks; incarnation {:016x} at {}",
                    replica.incarnation,
                    replica.url
                ),
                Ok(ReplicaMemory { blocks_written, buffers_free, .. }) => print_line!(
                    "  replica {index}: {blocks_written} blocks written, memory for {buffers_free} more; incarnation \
                     {:016x} at {}",
                    replica.incarnation,
                    replica.url
                ),
                Err(reason) => print_line!("  replica {index}: does not serve at {}: {reason}", replica.url),
            }
        }
        match &group.writer_ids {
            Ok(Some(WriterIds { claimed, of })) => print_line!("  {claimed} of {of} writer ids claimed"),
            Ok(None) => {}
            Err(reason) => print_line!("  writer ids: unknown: {reason}"),
        }
    }
    warn_of_scarce_ids(name, &stat);
    Ok(())
}

fn warn_of_scarce_ids(name: &str, stat: &VolumeStat) {
    stat.groups.iter().filter_map(|group| group.writer_ids.as_ref().ok().copied().flatten()).for_each(
        |ids| {
            warn_if_scarce(name, ids);
        },
    );
}

/// Warns of a volume that few further clients can write.
fn warn_if_scarce(name: &str, ids: WriterIds) {
    if ids.are_scarce() {
        note!(
            "farside: {} of {} writer ids of volume '{name}' are claimed, and none is ever free again: create another \
             volume and copy the bytes to it; let a program that writes often keep one client open",
            ids.claimed,
            ids.of
        );
    }
}

fn tell_dropped(name: &str, dropped: &DroppedVolume) -> Done {
    print_line!("volume '{name}' is dropped");
    for url in &dropped.silent {
        note!(
            "farside: {url} did not answer: it frees its part when a volume '{name}' is next dropped or created, or by \
             'farside heal'"
        );
    }
    if dropped.left.is_empty() {
        return Ok(());
    }
    for (store, error) in &dropped.left {
        note!("farside: its store '{store}' still takes memory: {error}");
    }
    Err(Failure::Error(format!(
        "{} stores of volume '{name}' are left, which nobody uses: remove the causes above, then drop the volume \
         again; if the nodes are gone for good, add --forget",
        dropped.left.len()
    )))
}

/// Parses, for clap, a number of bytes a second.
pub(super) fn rate(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text.strip_suffix("/s").unwrap_or(text)).ok().filter(|&bytes| bytes > 0);
    bytes.ok_or_else(|| format!("'{text}' is not a rate: give bytes a second, such as 100MiB"))
}
