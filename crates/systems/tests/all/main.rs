//! All integration tests of this crate in one binary, which links only once.
//! Only `huge_pages.rs` has its own binary.

#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]

mod abd_lock;
mod allocations;
mod art;
mod art_sim;
mod blocks;
mod btree;
mod cached_index;
mod chequer;
mod chequer_pool;
mod chequer_steps;
mod epochs;
mod farm;
mod farm_kv;
mod fasst;
mod fasst_promotion;
mod fasst_recovery;
mod fenced;
mod guarded;
mod latch;
mod life_and_death;
mod life_and_death_poison;
mod members;
#[cfg(farside_mutants)]
mod mutants;
mod owned;
mod pilaf;
mod pilaf_damage;
mod pilaf_races;
mod prism_kv;
mod prism_kv_dropped;
mod prism_kv_leaks;
mod prism_kv_lost;
mod prism_kv_races;
mod prism_kv_reach;
mod prism_kv_rebuild;
mod prism_kv_steps;
mod prism_tx;
mod prism_tx_kills;
mod prism_tx_sim;
mod prism_tx_steps;
mod raw;
mod read_stores;
mod reopened;
mod replacing;
mod ring_queue;
mod scrub;
mod sharded;
mod sherman;
mod sherman_sim;
mod sherman_steps;
mod smart;
mod smart_apart;
mod smart_kills;
mod smart_reopened;
mod smart_sim;
mod smart_sizes;
mod smart_steps;
#[path = "../support/mod.rs"]
mod support;
mod txn_session;
