//! Names and shapes of public models, from the geometry in their configs.

/// A tensor by name and shape.
pub(crate) type Tensor = (String, Vec<u64>);

/// The tensors of a model.
pub(crate) struct Model(pub(crate) Vec<Tensor>);

impl Model {
    /// Lines of a name and a shape. Braces stand for each of their alternatives, among which `3..7`
    /// are four numbers; `weight/bias` stands for both, of which the bias has one dimension.
    fn of(lines: &str) -> Self {
        let mut tensors = Vec::new();
        for line in lines.lines() {
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            let shape: Vec<u64> = words.map(|size| size.parse().unwrap()).collect();
            for name in expand(name) {
                if let Some(stem) = name.strip_suffix("weight/bias") {
                    tensors.push((format!("{stem}weight"), shape.clone()));
                    tensors.push((format!("{stem}bias"), shape[..1].into()));
                } else {
                    tensors.push((name, shape.clone()));
                }
            }
        }
        Self(tensors)
    }

    fn add(&mut self, lines: &str) {
        self.0.extend(Self::of(lines).0);
    }

    /// With these tensors too.
    fn and(mut self, lines: &str) -> Self {
        self.add(lines);
        self
    }
}

/// The names that a pattern stands for.
fn expand(pattern: &str) -> Vec<String> {
    let Some((before, rest)) = pattern.split_once('{') else { return vec![pattern.to_owned()] };
    let (inner, after) = rest.split_once('}').unwrap();
    let alternatives = inner.split(',').flat_map(|alternative| {
        let bounds = alternative.split_once("..").map(|(from, to)| (from.parse(), to.parse()));
        match bounds {
            Some((Ok(from), Ok(to))) => (from..to).map(|n: u64| n.to_string()).collect(),
            _ => vec![alternative.to_owned()],
        }
    });
    let after = expand(after);
    alternatives
        .flat_map(|one| after.iter().map(move |after| format!("{before}{one}{after}")))
        .collect()
}

pub(crate) fn llama_8b() -> Model {
    Model::of(
        "model.layers.{0..32}.self_attn.{q,o}_proj.weight 4096 4096
        model.layers.{0..32}.self_attn.{k,v}_proj.weight 1024 4096
        model.layers.{0..32}.mlp.{gate,up}_proj.weight 14336 4096
        model.layers.{0..32}.mlp.down_proj.weight 4096 14336
        model.layers.{0..32}.{input,post_attention}_layernorm.weight 4096
        {model.embed_tokens,lm_head}.weight 128256 4096
        model.norm.weight 4096",
    )
}

pub(crate) fn mixtral_8x7b() -> Model {
    Model::of(
        "model.layers.{0..32}.self_attn.{q,o}_proj.weight 4096 4096
        model.layers.{0..32}.self_attn.{k,v}_proj.weight 1024 4096
        model.layers.{0..32}.block_sparse_moe.gate.weight 8 4096
        model.layers.{0..32}.block_sparse_moe.experts.{0..8}.w{1,3}.weight 14336 4096
        model.layers.{0..32}.block_sparse_moe.experts.{0..8}.w2.weight 4096 14336
        model.layers.{0..32}.{input,post_attention}_layernorm.weight 4096
        {model.embed_tokens,lm_head}.weight 32000 4096
        model.norm.weight 4096",
    )
}

/// With its FP8 scales, and the layer for multi-token prediction at index 61.
pub(crate) fn deepseek_v3() -> Model {
    Model::of(
        "model.layers.{0..62}.self_attn.q_a_proj.weight 1536 7168
        model.layers.{0..62}.self_attn.q_a_proj.weight_scale_inv 12 56
        model.layers.{0..62}.self_attn.q_b_proj.weight 24576 1536
        model.layers.{0..62}.self_attn.q_b_proj.weight_scale_inv 192 12
        model.layers.{0..62}.self_attn.kv_a_proj_with_mqa.weight 576 7168
        model.layers.{0..62}.self_attn.kv_a_proj_with_mqa.weight_scale_inv 4 56
        model.layers.{0..62}.self_attn.kv_b_proj.weight 32768 512
        model.layers.{0..62}.self_attn.kv_b_proj.weight_scale_inv 256 4
        model.layers.{0..62}.self_attn.o_proj.weight 7168 16384
        model.layers.{0..62}.self_attn.o_proj.weight_scale_inv 56 128
        model.layers.{0..62}.self_attn.q_a_layernorm.weight 1536
        model.layers.{0..62}.self_attn.kv_a_layernorm.weight 512
        model.layers.{0..62}.{input,post_attention}_layernorm.weight 7168
        model.layers.{0..3}.mlp.{gate,up}_proj.weight 18432 7168
        model.layers.{0..3}.mlp.down_proj.weight 7168 18432
        model.layers.{3..62}.mlp.gate.weight 256 7168
        model.layers.{3..62}.mlp.gate.e_score_correction_bias 256
        model.layers.{3..62}.mlp.shared_experts.{gate,up}_proj.weight 2048 7168
        model.layers.{3..62}.mlp.shared_experts.down_proj.weight 7168 2048
        model.layers.{3..62}.mlp.experts.{0..256}.{gate,up}_proj.weight 2048 7168
        model.layers.{3..62}.mlp.experts.{0..256}.down_proj.weight 7168 2048
        model.layers.61.{embed_tokens,shared_head.head}.weight 129280 7168
        model.layers.61.eh_proj.weight 7168 14336
        model.layers.61.{enorm,shared_head.norm}.weight 7168
        {model.embed_tokens,lm_head}.weight 129280 7168
        model.norm.weight 7168",
    )
}

/// A mixture of experts with a lone layer for multi-token prediction, as in Qwen3-Next.
pub(crate) fn qwen3_next() -> Model {
    let layer = "LAYER.mlp.gate.weight 512 2048
        LAYER.mlp.shared_expert.{gate,up}_proj.weight 512 2048
        LAYER.mlp.shared_expert.down_proj.weight 2048 512
        LAYER.mlp.experts.{0..512}.{gate,up}_proj.weight 512 2048
        LAYER.mlp.experts.{0..512}.down_proj.weight 2048 512
        LAYER.{input,post_attention}_layernorm.weight 2048\n";
    let full = "LAYER.self_attn.q_proj.weight 8192 2048
        LAYER.self_attn.{k,v}_proj.weight 512 2048
        LAYER.self_attn.o_proj.weight 2048 8192\n";
    let linear = "LAYER.linear_attn.in_proj_qkvz.weight 12288 2048
        LAYER.linear_attn.in_proj_ba.weight 64 2048
        LAYER.linear_attn.out_proj.weight 2048 4096
        LAYER.linear_attn.A_log 32
        LAYER.linear_attn.conv1d.weight 8192 1 4\n";
    let mut lines = (layer.to_owned() + full).replace("LAYER", "mtp.layers.0");
    for n in 0..48 {
        let kind = if n % 4 == 3 { full } else { linear };
        lines += &(layer.to_owned() + kind).replace("LAYER", &format!("model.layers.{n}"));
    }
    Model::of(&lines).and(
        "mtp.fc.weight 2048 4096
        {model,mtp}.norm.weight 2048
        {model.embed_tokens,lm_head}.weight 151936 2048",
    )
}

/// Gemma 3 4B with its vision tower.
pub(crate) fn gemma3_4b() -> Model {
    clip_layers("vision_tower.vision_model.encoder.layers.{0..27}", 1152, 4304).and(
        "language_model.model.layers.{0..34}.self_attn.q_proj.weight 2048 2560
        language_model.model.layers.{0..34}.self_attn.{k,v}_proj.weight 1024 2560
        language_model.model.layers.{0..34}.self_attn.o_proj.weight 2560 2048
        language_model.model.layers.{0..34}.self_attn.{q,k}_norm.weight 256
        language_model.model.layers.{0..34}.mlp.{gate,up}_proj.weight 10240 2560
        language_model.model.layers.{0..34}.mlp.down_proj.weight 2560 10240
        language_model.model.layers.{0..34}.{input,post_attention}_layernorm.weight 2560
        language_model.model.layers.{0..34}.{pre,post}_feedforward_layernorm.weight 2560
        language_model.model.embed_tokens.weight 262208 2560
        language_model.model.norm.weight 2560
        vision_tower.vision_model.embeddings.patch_embedding.weight/bias 1152 3 14 14
        vision_tower.vision_model.embeddings.position_embedding.weight 4096 1152
        vision_tower.vision_model.post_layernorm.weight/bias 1152
        multi_modal_projector.mm_input_projection_weight 1152 2560
        multi_modal_projector.mm_soft_emb_norm.weight 1152",
    )
}

/// Layers as those of CLIP, of this width; their perceptrons have another one inside.
fn clip_layers(layers: &str, width: u64, inner: u64) -> Model {
    Model::of(&format!(
        "{layers}.self_attn.{{q_proj,k_proj,v_proj,out_proj}}.weight/bias {width} {width}
        {layers}.mlp.fc1.weight/bias {inner} {width}
        {layers}.mlp.fc2.weight/bias {width} {inner}
        {layers}.layer_norm{{1,2}}.weight/bias {width}"
    ))
}

pub(crate) fn clip_l() -> Model {
    let mut m = clip_layers("text_model.encoder.layers.{0..12}", 768, 3072);
    m.0.extend(clip_layers("vision_model.encoder.layers.{0..24}", 1024, 4096).0);
    m.and(
        "logit_scale
        text_model.embeddings.token_embedding.weight 49408 768
        text_model.embeddings.position_embedding.weight 77 768
        text_model.final_layer_norm.weight/bias 768
        vision_model.embeddings.class_embedding 1024
        vision_model.embeddings.patch_embedding.weight 1024 3 14 14
        vision_model.embeddings.position_embedding.weight 257 1024
        vision_model.{pre_layrnorm,post_layernorm}.weight/bias 1024
        visual_projection.weight 768 1024
        text_projection.weight 768 768",
    )
}

pub(crate) fn gpt2() -> Model {
    Model::of(
        "wte.weight 50257 768
        wpe.weight 1024 768
        h.{0..12}.{ln_1,ln_2}.weight/bias 768
        h.{0..12}.attn.c_attn.weight/bias 768 2304
        h.{0..12}.attn.c_proj.weight/bias 768 768
        h.{0..12}.attn.bias 1 1 1024 1024
        h.{0..12}.mlp.c_fc.weight/bias 768 3072
        h.{0..12}.mlp.c_proj.weight/bias 3072 768
        ln_f.weight/bias 768",
    )
}

/// Flan-T5 base.
pub(crate) fn flan_t5() -> Model {
    Model::of(
        "{shared,lm_head}.weight 32128 768
        {en,de}coder.block.{0..12}.layer.0.SelfAttention.{q,k,v,o}.weight 768 768
        {en,de}coder.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32 12
        {en,de}coder.block.{0..12}.layer.{0,1}.layer_norm.weight 768
        encoder.block.{0..12}.layer.1.DenseReluDense.wi_{0,1}.weight 2048 768
        encoder.block.{0..12}.layer.1.DenseReluDense.wo.weight 768 2048
        decoder.block.{0..12}.layer.1.EncDecAttention.{q,k,v,o}.weight 768 768
        decoder.block.{0..12}.layer.2.DenseReluDense.wi_{0,1}.weight 2048 768
        decoder.block.{0..12}.layer.2.DenseReluDense.wo.weight 768 2048
        decoder.block.{0..12}.layer.2.layer_norm.weight 768
        {en,de}coder.final_layer_norm.weight 768",
    )
}

/// all-MiniLM-L6-v2, whose names sentence-transformers prefixes with the index of the module.
pub(crate) fn mini_lm(prefix: &str) -> Model {
    let lines = "LAYER.attention.self.{query,key,value}.weight/bias 384 384
        LAYER.attention.output.dense.weight/bias 384 384
        LAYER.attention.output.LayerNorm.weight/bias 384
        LAYER.intermediate.dense.weight/bias 1536 384
        LAYER.output.dense.weight/bias 384 1536
        LAYER.output.LayerNorm.weight/bias 384
        PREFIXembeddings.word_embeddings.weight 30522 384
        PREFIXembeddings.position_embeddings.weight 512 384
        PREFIXembeddings.token_type_embeddings.weight 2 384
        PREFIXembeddings.LayerNorm.weight/bias 384
        PREFIXpooler.dense.weight/bias 384 384";
    Model::of(&lines.replace("LAYER", "PREFIXencoder.layer.{0..6}").replace("PREFIX", prefix))
}

/// The same with the dense module that some sentence encoders put after it.
pub(crate) fn mini_lm_with_head() -> Model {
    mini_lm("0.auto_model.").and("2.linear.weight/bias 512 384")
}

/// Two encoders of the same kind, told apart by a number.
pub(crate) fn two_numbered_towers() -> Model {
    mini_lm("model.{0,1}.")
}

/// A base vision transformer, or with `scales` its `DINOv2` form, which differs in its layer scales
/// and names.
pub(crate) fn vit(prefix: &str, scales: bool) -> Model {
    let mut lines = "PREFIXembeddings.cls_token 1 1 768
        PREFIXembeddings.position_embeddings 1 197 768
        PREFIXembeddings.patch_embeddings.projection.weight/bias 768 3 16 16
        LAYER.attention.attention.{query,key,value}.weight/bias 768 768
        LAYER.attention.output.dense.weight/bias 768 768
        LAYER.mlp.fc1.weight/bias 3072 768
        LAYER.mlp.fc2.weight/bias 768 3072
        LAYER.norm{1,2}.weight/bias 768
        PREFIXlayernorm.weight/bias 768\n"
        .to_owned();
    if scales {
        lines += "LAYER.layer_scale{1,2}.lambda1 768";
    }
    let lines = lines.replace("LAYER", "PREFIXencoder.layer.{0..12}");
    Model::of(&lines.replace("PREFIX", prefix))
}

/// A base vision transformer as torchvision names it: the index is glued to a name.
pub(crate) fn torchvision_vit() -> Model {
    Model::of(
        "class_token 1 1 768
        encoder.pos_embedding 1 197 768
        conv_proj.weight/bias 768 3 16 16
        encoder.layers.encoder_layer_{0..12}.ln_1.weight/bias 768
        encoder.layers.encoder_layer_{0..12}.self_attention.in_proj_weight 2304 768
        encoder.layers.encoder_layer_{0..12}.self_attention.out_proj.weight/bias 768 768
        encoder.layers.encoder_layer_{0..12}.mlp.0.weight/bias 3072 768
        encoder.layers.encoder_layer_{0..12}.mlp.3.weight/bias 768 3072
        encoder.ln.weight/bias 768
        heads.head.weight/bias 1000 768",
    )
}

pub(crate) fn whisper_large() -> Model {
    clip_layers("model.{en,de}coder.layers.{0..32}", 1280, 5120).and(
        "model.decoder.layers.{0..32}.encoder_attn.{q,k,v,out}_proj.weight/bias 1280 1280
        model.decoder.layers.{0..32}.encoder_attn_layer_norm.weight/bias 1280
        model.encoder.conv1.weight/bias 1280 128 3
        model.encoder.conv2.weight/bias 1280 1280 3
        model.encoder.embed_positions.weight 1500 1280
        model.decoder.embed_tokens.weight 51866 1280
        model.decoder.embed_positions.weight 448 1280
        model.{en,de}coder.layer_norm.weight/bias 1280",
    )
}

pub(crate) fn mamba_2_8b() -> Model {
    Model::of(
        "backbone.embeddings.weight 50280 2560
        backbone.layers.{0..64}.mixer.A_log 5120 16
        backbone.layers.{0..64}.mixer.D 5120
        backbone.layers.{0..64}.mixer.conv1d.weight/bias 5120 1 4
        backbone.layers.{0..64}.mixer.in_proj.weight 10240 2560
        backbone.layers.{0..64}.mixer.x_proj.weight 192 5120
        backbone.layers.{0..64}.mixer.out_proj.weight 2560 5120
        backbone.layers.{0..64}.mixer.dt_proj.weight/bias 5120 160
        backbone.layers.{0..64}.norm.weight 2560
        backbone.norm_f.weight 2560",
    )
}

pub(crate) fn flux_dev() -> Model {
    joint_blocks(19, 3072, 128).and(
        "x_embedder.weight/bias 3072 64
        context_embedder.weight/bias 3072 4096
        time_text_embed.{timestep,guidance,text}_embedder.linear_1.weight/bias 3072 256
        time_text_embed.{timestep,guidance,text}_embedder.linear_2.weight/bias 3072 3072
        single_transformer_blocks.{0..38}.attn.to_{q,k,v}.weight/bias 3072 3072
        single_transformer_blocks.{0..38}.attn.norm_{q,k}.weight 128
        single_transformer_blocks.{0..38}.norm.linear.weight/bias 9216 3072
        single_transformer_blocks.{0..38}.proj_mlp.weight/bias 12288 3072
        single_transformer_blocks.{0..38}.proj_out.weight/bias 3072 15360
        norm_out.linear.weight/bias 6144 3072
        proj_out.weight/bias 64 3072",
    )
}

/// Blocks that attend to images and text together.
fn joint_blocks(count: u64, width: u64, head: u64) -> Model {
    let block = format!("transformer_blocks.{{0..{count}}}");
    let (four, six) = (4 * width, 6 * width);
    Model::of(&format!(
        "{block}.attn.{{to_q,to_k,to_v,to_out.0,to_add_out}}.weight/bias {width} {width}
        {block}.attn.add_{{q,k,v}}_proj.weight/bias {width} {width}
        {block}.attn.norm_{{q,k,added_q,added_k}}.weight {head}
        {block}.{{ff,ff_context}}.net.0.proj.weight/bias {four} {width}
        {block}.{{ff,ff_context}}.net.2.weight/bias {width} {four}
        {block}.{{norm1,norm1_context}}.linear.weight/bias {six} {width}"
    ))
}

pub(crate) fn sdxl_unet() -> Model {
    let mut m = Model::of(
        "conv_in.weight/bias 320 4 3 3
        {time,add}_embedding.linear_2.weight/bias 1280 1280
        time_embedding.linear_1.weight/bias 1280 320
        add_embedding.linear_1.weight/bias 1280 2816
        down_blocks.0.downsamplers.0.conv.weight/bias 320 320 3 3
        down_blocks.1.downsamplers.0.conv.weight/bias 640 640 3 3
        up_blocks.0.upsamplers.0.conv.weight/bias 1280 1280 3 3
        up_blocks.1.upsamplers.0.conv.weight/bias 640 640 3 3
        conv_norm_out.weight/bias 320
        conv_out.weight/bias 4 320 3 3",
    );
    m.unet_stage("down_blocks.0", &[320, 320], 320);
    m.unet_stage("down_blocks.1", &[320, 640], 640);
    m.unet_stage("down_blocks.2", &[640, 1280], 1280);
    m.unet_stage("mid_block", &[1280, 1280], 1280);
    m.unet_stage("up_blocks.0", &[2560, 2560, 1920], 1280);
    m.unet_stage("up_blocks.1", &[1920, 1280, 960], 640);
    m.unet_stage("up_blocks.2", &[960, 640, 640], 320);
    m.unet_attention("down_blocks.1.attentions.{0,1}", 640, 2);
    m.unet_attention("down_blocks.2.attentions.{0,1}", 1280, 10);
    m.unet_attention("mid_block.attentions.0", 1280, 10);
    m.unet_attention("up_blocks.0.attentions.{0..3}", 1280, 10);
    m.unet_attention("up_blocks.1.attentions.{0..3}", 640, 2);
    m
}

impl Model {
    fn unet_stage(&mut self, stage: &str, inputs: &[u64], width: u64) {
        for (n, &input) in inputs.iter().enumerate() {
            let resnet = format!("{stage}.resnets.{n}");
            self.resnet(&resnet, input, width);
            self.add(&format!("{resnet}.time_emb_proj.weight/bias {width} 1280"));
            if input != width {
                self.add(&format!("{resnet}.conv_shortcut.weight/bias {width} {input} 1 1"));
            }
        }
    }

    fn resnet(&mut self, resnet: &str, input: u64, width: u64) {
        self.add(&format!(
            "{resnet}.norm1.weight/bias {input}
            {resnet}.conv1.weight/bias {width} {input} 3 3
            {resnet}.norm2.weight/bias {width}
            {resnet}.conv2.weight/bias {width} {width} 3 3"
        ));
    }

    fn unet_attention(&mut self, name: &str, width: u64, depth: u64) {
        let block = format!("{name}.transformer_blocks.{{0..{depth}}}");
        let (four, eight) = (4 * width, 8 * width);
        self.add(&format!(
            "{name}.norm.weight/bias {width}
            {name}.proj_{{in,out}}.weight/bias {width} {width}
            {block}.attn1.to_{{q,k,v}}.weight {width} {width}
            {block}.attn2.to_q.weight {width} {width}
            {block}.attn2.to_{{k,v}}.weight {width} 2048
            {block}.attn{{1,2}}.to_out.0.weight/bias {width} {width}
            {block}.ff.net.0.proj.weight/bias {eight} {width}
            {block}.ff.net.2.weight/bias {width} {four}
            {block}.norm{{1,2,3}}.weight/bias {width}"
        ));
    }
}

/// Swin tiny: stages of blocks.
pub(crate) fn swin_tiny() -> Model {
    let mut m = Model::of(
        "patch_embed.proj.weight/bias 96 3 4 4
        patch_embed.norm.weight/bias 96
        norm.weight/bias 768
        head.weight/bias 1000 768",
    );
    for (stage, depth) in [2, 2, 6, 2].into_iter().enumerate() {
        let block = format!("layers.{stage}.blocks.{{0..{depth}}}");
        let (w, three, four, heads) = (96 << stage, 288 << stage, 384 << stage, 3 << stage);
        m.add(&format!(
            "{block}.norm{{1,2}}.weight/bias {w}
            {block}.attn.qkv.weight/bias {three} {w}
            {block}.attn.proj.weight/bias {w} {w}
            {block}.attn.relative_position_bias_table 169 {heads}
            {block}.mlp.fc1.weight/bias {four} {w}
            {block}.mlp.fc2.weight/bias {w} {four}"
        ));
    }
    m.and(
        "layers.0.downsample.norm.weight/bias 384
        layers.0.downsample.reduction.weight 192 384
        layers.1.downsample.norm.weight/bias 768
        layers.1.downsample.reduction.weight 384 768
        layers.2.downsample.norm.weight/bias 1536
        layers.2.downsample.reduction.weight 768 1536",
    )
}

/// ResNet-18: flat blocks in stages whose numbers are glued to a name.
pub(crate) fn resnet18() -> Model {
    let mut m = Model::of(
        "conv1.weight 64 3 7 7
        bn1.weight/bias 64
        layer1.0.conv1.weight 64 64 3 3
        fc.weight/bias 1000 512",
    );
    for stage in 1..=4 {
        let (layer, w) = (format!("layer{stage}"), 32 << stage);
        m.add(&format!(
            "{layer}.{{0,1}}.bn{{1,2}}.weight/bias {w}
            {layer}.{{0,1}}.conv2.weight {w} {w} 3 3
            {layer}.1.conv1.weight {w} {w} 3 3"
        ));
        if stage > 1 {
            let before = w / 2;
            m.add(&format!(
                "{layer}.0.conv1.weight {w} {before} 3 3
                {layer}.0.downsample.0.weight {w} {before} 1 1
                {layer}.0.downsample.1.weight/bias {w}"
            ));
        }
    }
    m
}

/// A mixture of experts whose matrices are quantized: several matrices make up one layer of an
/// expert.
pub(crate) fn quantized_mixtral() -> Model {
    let mut m = Model(Vec::new());
    for (name, shape) in mixtral_8x7b().0 {
        let matrix = name.strip_suffix(".weight");
        match matrix.filter(|name| name.contains("experts") || name.contains("_proj")) {
            Some(name) => {
                let (rows, columns) = (shape[0], shape[1]);
                let (packed, groups) = (rows / 8, columns / 128);
                m.add(&format!("{name}.qweight {columns} {packed}"));
                m.add(&format!("{name}.qzeros {groups} {packed}"));
                m.add(&format!("{name}.scales {groups} {rows}"));
            }
            None => m.0.push((name, shape)),
        }
    }
    m
}

/// Nemotron-H 8B: each layer is one of three kinds.
pub(crate) fn nemotron_h() -> Model {
    let mut m = Model::of(
        "{backbone.embeddings,lm_head}.weight 131072 4096
        backbone.layers.{0..52}.norm.weight 4096
        backbone.norm_f.weight 4096",
    );
    let pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-";
    for (n, kind) in pattern.chars().enumerate() {
        let lines = match kind {
            'M' => {
                "MIXER.A_log 128
                MIXER.conv1d.weight/bias 10240 1 4
                MIXER.norm.weight 8192
                MIXER.in_proj.weight 18560 4096
                MIXER.out_proj.weight 4096 8192"
            }
            '*' => {
                "MIXER.{q,o}_proj.weight 4096 4096
                MIXER.{k,v}_proj.weight 1024 4096"
            }
            _ => {
                "MIXER.up_proj.weight 21504 4096
                MIXER.down_proj.weight 4096 21504"
            }
        };
        m.add(&lines.replace("MIXER", &format!("backbone.layers.{n}.mixer")));
    }
    m
}

/// The decoder of a diffusion VAE: flat blocks in stages.
pub(crate) fn vae_decoder() -> Model {
    let mut m = Model::of(
        "decoder.conv_in.weight/bias 512 16 3 3
        decoder.mid_block.attentions.0.{to_q,to_k,to_v,to_out.0}.weight/bias 512 512
        decoder.conv_out.weight/bias 3 128 3 3",
    );
    m.resnet("decoder.mid_block.resnets.{0,1}", 512, 512);
    m.resnet("decoder.up_blocks.{0,1}.resnets.{0..3}", 512, 512);
    m.resnet("decoder.up_blocks.2.resnets.0", 512, 256);
    m.resnet("decoder.up_blocks.2.resnets.{1,2}", 256, 256);
    m.resnet("decoder.up_blocks.3.resnets.0", 256, 128);
    m.resnet("decoder.up_blocks.3.resnets.{1,2}", 128, 128);
    m
}
