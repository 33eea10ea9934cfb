//! `volume scrub`: compares all replicas of each block, and repairs those that are behind.

use super::rate;
use crate::cli::{Done, Failure, progress};
use farside::Pool;
use farside::config::parse_bytes;
use farside::volume::{self, Volume};
use std::time::Instant;

/// Compare all replicas of each block by tag and bytes, and repair those that are behind.
#[derive(clap::Args)]
pub(super) struct Scrub {
    /// Name of the volume
    name: String,
    /// First byte to compare; the whole block is compared
    #[arg(long, value_name = "BYTES", default_value = "0", value_parser = parse_bytes)]
    offset: u64,
    /// Number of bytes to compare [default: up to the end of the volume]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    length: Option<u64>,
    /// Bytes of blocks to compare a second, at most [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = rate)]
    rate: Option<u64>,
    /// Blocks in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=64))]
    in_flight: u32,
    /// Print no progress
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Scrub {
    pub(super) fn run(self, pool: &Pool) -> Done {
        let mut volume = Volume::open(pool, &self.name)?.with_in_flight(self.in_flight as usize);
        let block = volume.block_len() as u64;
        let end = match self.length {
            None => volume.size(),
            Some(length) => self.offset.saturating_add(length),
        };
        if self.offset > volume.size() || end > volume.size() {
            return Err(Failure::Error(format!(
                "volume '{}' has {} bytes, and not all of those to compare: give a smaller --offset or --length",
                self.name,
                volume.size()
            )));
        }
        let blocks = self.offset / block..end.div_ceil(block);
        let (began, bar) =
            (Instant::now(), progress("comparing blocks", blocks.end - blocks.start, self.quiet));
        let found = volume.scrub(blocks, self.rate, |so_far| bar.set_position(so_far.blocks))?;
        bar.finish_and_clear();
        let volume::Scrub { blocks, repaired, damaged, first_damaged, incomplete } = found;
        let seconds = began.elapsed().as_secs_f64();
        if self.json {
            print_line!(
                "{}",
                serde_json::json!({
                    "blocks": blocks,
                    "repaired": repaired,
                    "damaged": damaged,
                    "first_damaged": first_damaged,
                    "incomplete": incomplete,
                    "seconds": seconds,
                })
            );
        } else {
            print_line!(
                "{blocks} blocks compared in {seconds:.1} s: {repaired} had a replica that was behind, and all \
                 replicas that answered have them now"
            );
        }
        if let Some(first) = first_damaged {
            return Err(Failure::Error(format!(
                "{damaged} blocks have replicas with different bytes of one write, the first at byte {}: the memory of \
                 a node is damaged; write these blocks again, and replace the node",
                first * block
            )));
        }
        if incomplete > 0 {
            return Err(Failure::Error(format!(
                "{incomplete} blocks were not compared at all replicas, since some did not answer or have lost their \
                 memory: 'farside volume stat {}' names them; then scrub again",
                self.name
            )));
        }
        Ok(())
    }
}
