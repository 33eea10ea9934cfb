//! `store`: make, list and drop stores.

use super::{Done, Failure, Target, bytes, human_bytes};
use farside::NewStore;

/// Make, list and drop stores.
#[derive(clap::Args)]
pub(super) struct Store {
    #[command(flatten)]
    target: Target,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make a store
    Create {
        /// 1 to 64 letters, digits, '-', '_' or '.'
        name: String,
        /// Bytes for its table and items together: a multiple of 1MiB
        #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = bytes)]
        quota: u64,
        /// Items that its table is to have room for [default: from the quota]
        #[arg(long, value_name = "N")]
        items: Option<u64>,
        /// Which system
        #[arg(long, default_value = "prism-kv")]
        kind: String,
        /// Give each key of 8 bytes a slot of its own (the paper's collision-free layout)
        #[arg(long)]
        collision_free: bool,
    },
    /// List the stores
    List {
        /// One JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Drop a store with everything in it
    Drop {
        /// Its name
        name: String,
    },
}

impl Store {
    pub(super) fn run(self) -> Done {
        let (pool, _) = self.target.connect()?;
        match self.action {
            Action::Create { name, quota, items, kind, collision_free } => {
                if quota % (1 << 20) != 0 || quota == 0 {
                    return Err(Failure::Told(format!(
                        "a quota of {quota} bytes is no multiple of 1 MiB: give one like 64MiB"
                    )));
                }
                let store = pool.create_store(&NewStore { name, kind, quota, items, collision_free })?;
                println!("store '{}' has {}", store.name, human_bytes(store.quota));
            }
            Action::List { json } => {
                for store in pool.stores()? {
                    if json {
                        println!("{}", serde_json::to_string(&store)?);
                    } else {
                        println!("{}\t{}\t{}", store.name, store.kind, human_bytes(store.quota));
                    }
                }
            }
            Action::Drop { name } => {
                pool.drop_store(&name)?;
                println!("store '{name}' is dropped");
            }
        }
        Ok(())
    }
}
