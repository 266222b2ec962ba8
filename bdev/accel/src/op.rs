//! The operations.

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// An operation, by SPDK's name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum AccelOp {
            $($(#[$doc])* $name),*
        }

        impl AccelOp {
            /// Every operation, in the order of [`index`](Self::index), which is SPDK's.
            pub const ALL: [AccelOp; AccelOp::COUNT] = [$(AccelOp::$name),*];

            /// Number of operations.
            pub const COUNT: usize = [$($text),*].len();

            /// SPDK's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(AccelOp::$name => $text),*
                }
            }
        }
    };
}

operations! {
    /// Copies bytes.
    Copy = "copy";
    /// Sets bytes to one value.
    Fill = "fill";
    /// Copies bytes to two places.
    Dualcast = "dualcast";
    /// Compares bytes.
    Compare = "compare";
    /// The CRC32C of bytes.
    Crc32c = "crc32c";
    /// Copies bytes, and their CRC32C.
    CopyCrc32c = "copy_crc32c";
    /// Compresses; no engine has it.
    Compress = "compress";
    /// Decompresses; no engine has it.
    Decompress = "decompress";
    /// Encrypts blocks.
    Encrypt = "encrypt";
    /// Decrypts blocks.
    Decrypt = "decrypt";
    /// The exclusive or of several sources.
    Xor = "xor";
    /// Verifies interleaved protection information.
    DifVerify = "dif_verify";
    /// Copies blocks without the interleaved protection information, which is verified.
    DifVerifyCopy = "dif_verify_copy";
    /// Generates interleaved protection information.
    DifGenerate = "dif_generate";
    /// Copies blocks and inserts protection information.
    DifGenerateCopy = "dif_generate_copy";
    /// Generates protection information in separate metadata.
    DixGenerate = "dix_generate";
    /// Verifies protection information in separate metadata.
    DixVerify = "dix_verify";
}

impl AccelOp {
    /// A dense index from 0, for tables by operation.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The operation of this name.
    pub fn from_name(name: &str) -> Option<AccelOp> {
        AccelOp::ALL.into_iter().find(|op| op.name() == name)
    }
}
